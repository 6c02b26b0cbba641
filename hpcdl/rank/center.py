"""The center of a strategy whose workers differ, put into a model: for a while, or for good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from hpcdl.strategies.base.strategy import Worker


@contextlib.contextmanager
def center_in_place(worker: Worker, variables: Sequence[Any]) -> Iterator[None]:
    """Inside, `variables` (the trainable ones) hold the center, afterwards the worker's own values again.

    Collective; does nothing where the strategy has no center.
    """
    center = worker.center()
    if center is None:
        yield
        return
    own = [numpy.array(variable) for variable in variables]
    assign_all(variables, center)
    try:
        yield
    finally:
        assign_all(variables, own)


def move_to_center(worker: Worker, variables: Sequence[Any]) -> None:
    """Leave the center in `variables` for good. Collective."""
    center = worker.center()
    if center is not None:
        assign_all(variables, center)


def assign_all(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Give each variable its value."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)

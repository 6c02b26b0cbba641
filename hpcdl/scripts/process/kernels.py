"""Faster kernels under Keras's layers, for a script that asks for them, or whose `hpcdl run` does."""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

KERNELS_VARIABLE = "HPCDL_FAST_KERNELS"
"""Set in the ranks of `hpcdl run --fast-kernels auto`, or `on`."""


def fast_kernels(*, on: bool = True) -> tuple[str, ...]:
    """Let Keras's layers compute by faster kernels in all models of this process; returns the names of those.

    Each is held against Keras's own first: outputs, gradients and statistics may differ by 1e-5 of the largest. One
    that differs more is left out, with a warning. Call it before `fit`, or before a step is traced: a graph that exists
    keeps what it has. Models, their weights and what is saved stay Keras's. With `on=False`, or with a GPU, Keras
    computes everything itself.
    """
    return _used("auto" if on else "off")


def use_kernels_of_launch() -> None:
    """What `hpcdl run --fast-kernels` says, once; before the first step is traced."""
    choice = os.environ.pop(KERNELS_VARIABLE, "")
    if choice:
        _used(choice)


def kernels_in_force() -> tuple[str, ...]:
    """Their names; of a script that has asked for none, nothing is imported to find out."""
    table = sys.modules.get("hpcdl.step.kernels.table")
    names: tuple[str, ...] = table.names_in_force() if table else ()
    return names


def _used(choice: str) -> tuple[str, ...]:
    from hpcdl.step.kernels.table import use_chosen_kernels

    # A thread of its own is outside of the graph that is traced, where a tape may be made. Inside tf.init_scope no tape
    # records, so no gradient would be compared.
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(use_chosen_kernels, None, choice).result()
    for text in found.warnings:
        warnings.warn(text, stacklevel=3)
    return found.names

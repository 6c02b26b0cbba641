"""The sum that all-reduces form where none is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


def plain_add(target: Array, incoming: Array) -> None:
    """`target` += `incoming`, in place; float16 is widened and rounded once, as numpy does."""
    numpy.add(target, incoming, out=target)

"""Batch buffers that are used again: on many systems touching fresh memory costs more than filling it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Bytes; TensorFlow takes an array of this alignment over without a copy."""


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised C-contiguous array whose first byte stands at a multiple of ALIGNMENT."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return np.ndarray(shape, dtype, memory, first)


class BufferPool:
    """Arrays of one shape; one that nobody outside the pool refers to any more is handed out again.

    A tensor made from an array without a copy holds a reference to it, so a buffer comes back when its tensor dies.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._shape = shape
        self._dtype = dtype
        self._arrays: list[npt.NDArray[Any]] = []

    def __len__(self) -> int:
        return len(self._arrays)

    def take(self) -> npt.NDArray[Any]:
        """An array with arbitrary content that the caller alone refers to."""
        for position in range(len(self._arrays)):
            # Two references each: its owner (the pool's list; the array) and the argument of getrefcount itself.
            # Views made of the array refer to the memory behind it, not to the array.
            if sys.getrefcount(self._arrays[position]) == 2 and sys.getrefcount(self._arrays[position].base) == 2:
                return self._arrays[position]
        fresh = aligned_empty(self._shape, self._dtype)
        self._arrays.append(fresh)
        return fresh

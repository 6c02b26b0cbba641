"""What an all-reduce keeps from call to call: scratch buffers, sub-communicators, measured tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an all-reduce costs: `rounds` for a buffer of one slice, `bytes` sent by the busiest rank.

    `chain_bytes` are those of the messages that follow one another, where they are more than a rank sends itself.
    """

    rounds: int
    bytes: int
    chain_bytes: int = 0

    @property
    def bytes_in_turn(self) -> int:
        """What bandwidth costs: bytes that nobody can send at the same time."""
        return max(self.bytes, self.chain_bytes)


def unseen(part: Array) -> None:
    """Nobody looks at what is finished."""


class Workspace:
    """Persistent scratch of one all-reduce on one communicator; not for use by two threads at once.

    Buffers are touched once and kept: a fresh page costs more than the copy that it saves. `message_bytes` is
    the largest message: longer buffers travel in slices that stay in the cache. `measure` lets `auto` time the
    algorithms when it has no table; without it, `auto` goes by size alone, the same in every run.
    """

    def __init__(self, *, message_bytes: int = 4 << 20, measure: bool = True) -> None:
        self.message_bytes = message_bytes
        self.measure = measure
        self._scratch: dict[Any, Array] = {}
        self._kept: dict[Any, Any] = {}
        self._closers: list[Callable[[], None]] = []

    def scratch(self, key: Any, num_elements: int, dtype: Any) -> Array:
        """A flat buffer of its own for each `key`; what it held before is undefined."""
        num_bytes = num_elements * numpy.dtype(dtype).itemsize
        if key not in self._scratch or self._scratch[key].nbytes < num_bytes:
            self._scratch[key] = numpy.zeros(num_bytes, numpy.uint8)
        view: Array = self._scratch[key][:num_bytes].view(dtype)
        return view

    def keep(self, key: Any, make: Callable[[], Kept], close: Callable[[Kept], None] = lambda _: None) -> Kept:
        """What `make` returned when `key` was first asked for; `close` is called on it by `Workspace.close`."""
        if key not in self._kept:
            made = make()
            self._kept[key] = made
            self._closers.append(lambda: close(made))
        kept: Kept = self._kept[key]
        return kept

    def close(self) -> None:
        """Give everything back, sub-communicators too; every rank calls it."""
        self._scratch.clear()
        self._kept.clear()
        while self._closers:
            self._closers.pop()()

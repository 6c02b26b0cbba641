"""Prefetch batches: a thread that keeps a few ready, and buffers that are reused.

On many systems touching fresh memory costs more than filling it.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import original

ALIGNMENT = 64
"""Bytes; TensorFlow uses an array of this alignment without copying it."""
Item = TypeVar("Item")
_POLL_S = 0.1


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised C-contiguous array whose first byte is at a multiple of ALIGNMENT."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    # numpy's own arrays may begin at any multiple of 16 bytes.
    first = -memory.ctypes.data % ALIGNMENT
    return np.ndarray(shape, dtype, memory, first)


class BufferPool:
    """A pool of arrays of one shape; an array is reused once nothing outside the pool refers to it.

    A tensor made from an array without a copy holds a reference to it, so a buffer is free again when its tensor is
    deleted.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._shape = shape
        self._dtype = dtype
        self._arrays: list[npt.NDArray[Any]] = []

    def __len__(self) -> int:
        return len(self._arrays)

    def take(self) -> npt.NDArray[Any]:
        """Return an array with arbitrary content that only the caller refers to."""
        for position in range(len(self._arrays)):
            # Two references each: the owner (the pool's list; the array) and the argument of getrefcount itself.
            # Views of the array refer to the memory behind it, not to the array.
            if sys.getrefcount(self._arrays[position]) == 2 and sys.getrefcount(self._arrays[position].base) == 2:
                return self._arrays[position]
        fresh = aligned_empty(self._shape, self._dtype)
        self._arrays.append(fresh)
        return fresh


class _End:
    """Marks the end of the items; carries the error that ended them, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetched(Generic[Item]):
    """Iterates over what `produce()` yields, `depth` items ahead; an error is raised in place of the item that failed.

    `close()` ends the thread and calls `release`. The end of the items, an error, and the interpreter's exit do the
    same.
    """

    def __init__(
        self, produce: Callable[[], Iterator[Item]], *, depth: int = 2, release: Callable[[], None] = lambda: None
    ) -> None:
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        stop = threading.Event()
        # Not a bound method: a thread that refers to this object would keep it from being finalized.
        thread = threading.Thread(target=_run, args=(produce, self._ready, stop), name="hpcdl-prefetch", daemon=True)
        self._finish = weakref.finalize(self, _end, thread, stop, release)
        self._over = False
        thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if self._over:
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, _End):
            self._over = True
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item  # type: ignore[no-any-return]  # the queue holds items and ends

    def close(self) -> None:
        """End the thread and drop all further items."""
        self._over = True
        self._finish()


def _run(produce: Callable[[], Iterator[Any]], ready: queue.Queue[Any], stop: threading.Event) -> None:
    end = _End(None)
    try:
        for item in produce():
            if not _put(ready, item, stop):
                return
    except BaseException as error:  # noqa: BLE001  raised again by `__next__` in place of the item
        end = _End(original(error))
    _put(ready, end, stop)


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_S)  # a full queue that nobody reads must not hide `stop`
        except queue.Full:
            continue
        return True
    return False


def _end(thread: threading.Thread, stop: threading.Event, release: Callable[[], None]) -> None:
    stop.set()
    # The finalizer may run in the producing thread itself, which cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(timeout=10)  # first: it reads from what `release` closes
    release()

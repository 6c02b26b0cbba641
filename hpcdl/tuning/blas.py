"""Keeps numpy's and scipy's linear algebra on one thread while the search thinks.

Its matrices are small: several threads take longer for them than one, and much longer on cores that are busy, because
OpenBLAS's threads wait for each other with the processor running.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

from threadpoolctl import ThreadpoolController


@cache
def _pools() -> ThreadpoolController:
    """The libraries that are loaded when the search begins; the surrogate has brought numpy's and scipy's by then."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """A block whose linear algebra runs on the calling thread alone; the number of threads before comes back after."""
    limited: AbstractContextManager[object] = _pools().limit(limits=1, user_api="blas")
    return limited

"""Keeps numpy's and scipy's linear algebra on one thread while the search thinks.

Its matrices are small: on two threads they take twice as long, and five to ten times on cores that are busy, because
OpenBLAS's threads wait for each other with the processor running.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import scipy.linalg  # noqa: F401  scipy brings a BLAS of its own, which is found only once it is loaded
from threadpoolctl import ThreadpoolController


@cache
def _pools() -> ThreadpoolController:
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """A block whose linear algebra runs on the calling thread alone; the number of threads before comes back after."""
    limited: AbstractContextManager[object] = _pools().limit(limits=1, user_api="blas")
    return limited

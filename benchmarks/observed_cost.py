"""Cost of observing an operation: median microseconds of processor time, on a communicator that does nothing.

python benchmarks/observed_cost.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy

from hpcdl.comm.observed import observe

CALLS, ROUNDS = 20_000, 15


class Nothing:
    """A communicator of two ranks whose operations end at once."""

    rank, size, host, library = 0, 2, "here", "nothing"

    def isend(self, buffer: Any, destination: int, tag: int = 0) -> Nothing:
        return self

    irecv = isend

    def wait(self) -> None:
        return

    def wait_any(self, requests: Any, look: Any = None) -> int:
        return 0

    def barrier(self) -> None:
        return

    def allreduce(self, buffer: Any, add: Any = None) -> None:
        return


def microseconds(function: Callable[[], Any]) -> float:
    began = time.thread_time()
    for _ in range(CALLS):
        function()
    return (time.thread_time() - began) / CALLS * 1e6


def main() -> None:
    plain: Any = Nothing()
    observed: Any = observe(plain)
    buffer = numpy.zeros(1)
    operations: dict[str, Callable[[Any], Callable[[], Any]]] = {
        "send and wait": lambda group: lambda: group.isend(buffer, 1).wait(),
        "receive and wait for any": lambda group: lambda: group.wait_any([group.irecv(buffer, 1)]),
        "barrier": lambda group: group.barrier,
        "all-reduce": lambda group: lambda: group.allreduce(buffer),
    }
    each = {"send and wait": 2, "receive and wait for any": 2}
    for name, make in operations.items():
        pairs = [(microseconds(make(observed)), microseconds(make(plain))) for _ in range(ROUNDS)]
        extra = statistics.median(with_it - without for with_it, without in pairs) / each.get(name, 1)
        print(f"{name}: {extra:.2f} us an operation")


if __name__ == "__main__":
    main()

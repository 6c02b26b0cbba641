"""More processes of this program, for work that one interpreter does piece by piece."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from hpcdl.core.lifeline import end_with_parent
from hpcdl.core.signals import ignore

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Alone(Executor):
    """No other process: work is done when it is handed over."""

    def submit(self, work: Callable[Given, Found], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Found]:
        """The future of work that is done already; what goes wrong is raised here."""
        done: Future[Found] = Future()
        done.set_result(work(*args, **kwargs))
        return done


def workforce(most: int) -> Executor:
    """Up to `most` processes for `submit` and `map`; none where there is a single core.

    They are forked at the first use, so that must come before this process has threads. Work and what comes of it are
    pickled: between these processes, never in a file. They end with this one, however that ends.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return Alone()
    # Imported here: a command that needs one process pays for no other.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    fork: Any = get_context("fork")
    return ProcessPoolExecutor(most, mp_context=fork, initializer=_begin, initargs=(os.getpid(),))


def _begin(parent: int) -> None:
    ignore(signal.SIGINT)  # Ctrl-C reaches all; the parent decides
    end_with_parent(parent)

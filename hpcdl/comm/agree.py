"""Rank 0 decides for all: its answer or its failure reaches every rank, so that none waits for a rank that left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hpcdl.core.errors import HpcdlError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

Answer = TypeVar("Answer")


class SilentExit(HpcdlError):
    """Another rank reports the error to the user; this one exits with the same code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def decided(communicator: Communicator, decide: Callable[[], Answer]) -> Answer:
    """Return on every rank the result of `decide` on rank 0 (anything JSON can hold); collective.

    An HpcdlError on rank 0 is raised there, and SilentExit with its code on the others. Any other error is raised on
    rank 0 only: the caller must end the job.
    """
    problem: HpcdlError | None = None
    answer: Answer | None = None
    if communicator.rank == 0:
        try:
            answer = decide()
        except HpcdlError as error:
            problem = error  # raised below: the others wait in the agreement
    # Gathered, not broadcast: only rank 0 knows the answer's length, which a broadcast needs on every rank.
    exit_code, shared = communicator.allgather_json([problem.exit_code if problem else None, answer])[0]
    if problem is not None:
        raise problem
    if exit_code is not None:
        raise SilentExit(exit_code)
    followed: Answer = shared
    return followed

"""Rank 0 decides, all follow: its answer or its failure reaches every rank, so that nobody waits for one that left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hpcdl.core.errors import HpcdlError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

Answer = TypeVar("Answer")


class SilentExit(HpcdlError):
    """Another rank tells the user what went wrong; this one leaves with the same code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def decided(communicator: Communicator, decide: Callable[[], Answer]) -> Answer:
    """What `decide` returns on rank 0 (anything JSON can hold), on every rank; collective.

    An HpcdlError of rank 0's is raised there, and SilentExit with its code on the others. Any other error is rank 0's
    alone: whoever runs the rank ends the job.
    """
    problem: HpcdlError | None = None
    answer: Answer | None = None
    if communicator.rank == 0:
        try:
            answer = decide()
        except HpcdlError as error:
            problem = error
    exit_code, shared = communicator.allgather_json([problem.exit_code if problem else None, answer])[0]
    if problem is not None:
        raise problem
    if exit_code is not None:
        raise SilentExit(exit_code)
    followed: Answer = shared
    return followed

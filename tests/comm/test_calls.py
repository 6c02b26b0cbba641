"""What MPI raises names the rank and its node."""

from __future__ import annotations

import pytest

from hpcdl.comm.mpi.calls import translated
from hpcdl.core.errors import BrokenGroup, RankError


class Library:
    """Stands for the mpi4py module."""

    ERR_TRUNCATE, ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING, ERR_REVOKED = range(4)

    class Exception(RuntimeError):
        """What the library raises."""

        def __init__(self, text: str, error_class: int = 0) -> None:
            super().__init__(text)
            self.Get_error_class = lambda: error_class


class Asker:
    """An object as comm/mpi/communicator.py has them."""

    _mpi = Library
    rank, host = 3, "node7"

    @translated
    def ask(self, error: BaseException | None) -> str:
        """Raise or answer."""
        if error:
            raise error
        return "answer"


def test_the_library_s_errors_are_translated_and_others_are_not() -> None:
    assert Asker().ask(None) == "answer"
    with pytest.raises(RankError, match="rank 3 on node7: MPI failed in ask: message truncated") as caught:
        Asker().ask(Library.Exception("message truncated"))
    assert (caught.value.rank, caught.value.host) == (3, "node7") and not isinstance(caught.value, BrokenGroup)
    with pytest.raises(KeyError):
        Asker().ask(KeyError("other"))


@pytest.mark.parametrize("error_class", [Library.ERR_PROC_FAILED, Library.ERR_PROC_FAILED_PENDING, Library.ERR_REVOKED])
def test_a_group_that_has_lost_a_rank_says_so(error_class: int) -> None:
    with pytest.raises(BrokenGroup, match="rank 3 on node7: MPI failed in ask: a process is gone"):
        Asker().ask(Library.Exception("a process is gone", error_class))

"""What MPI raises names the rank and its node."""

from __future__ import annotations

import pytest

from hpcdl.comm.mpi.calls import translated
from hpcdl.core.errors import RankError


class Library:
    """Stands for the mpi4py module."""

    class Exception(RuntimeError):
        """What the library raises."""


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
    assert (caught.value.rank, caught.value.host) == (3, "node7")
    with pytest.raises(KeyError):
        Asker().ask(KeyError("other"))

"""Errors of MPI name the rank and its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy
import pytest

from hpcdl.comm.mpi.calls import translated
from hpcdl.comm.mpi.communicator import MpiCommunicator
from hpcdl.core.errors import BrokenGroup, RankError


class Library:
    """A stand-in for the mpi4py module."""

    ERR_TRUNCATE, ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING, ERR_REVOKED = range(4)

    class Exception(RuntimeError):
        """The library's exception."""

        def __init__(self, text: str, error_class: int = 0) -> None:
            super().__init__(text)
            self.Get_error_class = lambda: error_class


class Asker:
    """An object with MPI calls, as in comm/mpi/communicator.py."""

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


@pytest.mark.parametrize(
    "collective",
    [
        lambda group: group.broadcast(numpy.zeros(3, numpy.float32)),
        lambda group: group.allreduce(numpy.zeros(3, numpy.float32)),
        lambda group: group.allreduce(numpy.zeros(3, numpy.float16)),
        lambda group: group.allgather_json({"a": 1}),
    ],
)
def test_a_collective_that_ends_well_without_a_rank_has_broken_the_group(
    collective: Callable[[MpiCommunicator], Any],
) -> None:
    """A collective that succeeds without a dead rank breaks the group: Open MPI 5 leaves out that rank's part."""
    library, group = MagicMock(Exception=Library.Exception), MagicMock()
    library.get_vendor.return_value = "none", (1,)
    group.Get_rank.return_value, group.Get_size.return_value = 0, 3
    group.Get_failed().Translate_ranks.return_value = [2]
    with pytest.raises(BrokenGroup, match="has lost 1 of 3 ranks"):
        collective(MpiCommunicator(library, group))


def test_messages_of_a_revoked_group_are_not_looked_at() -> None:
    """Messages of a revoked group are not tested: Open MPI would free those in flight, and end the job on arrival."""
    handle, looked = MagicMock(), MagicMock()
    handle.Is_revoked.return_value = False
    library: Any = MagicMock(Exception=Library.Exception, Request=looked, get_vendor=lambda: ("played", (5, 0)))
    looked.Testany.return_value = (0, True)
    group = MpiCommunicator(library, handle)
    sending = group.isend(numpy.zeros(1, numpy.float32), 1)
    sending.test()
    assert group.wait_any([sending]) == 0
    handle.Is_revoked.return_value = True
    looked.Testany.reset_mock()
    sending.handle.Test.reset_mock()
    for look in (lambda: group.wait_any([sending]), sending.test):
        with pytest.raises(BrokenGroup, match="the group was revoked"):
            look()
    looked.Testany.assert_not_called()
    sending.handle.Test.assert_not_called()
    sending.wait()
    sending.handle.Wait.assert_called_once()

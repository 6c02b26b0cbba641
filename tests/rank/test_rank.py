"""The last message of a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcdl.cluster import supervise
from hpcdl.cluster.launchers import find_launcher
from hpcdl.core.errors import HpcdlError, RankError
from hpcdl.core.protocols import LaunchPlan
from hpcdl.run.ended import one_line, verdict
from tests.lab.needs import DEBIAN_OPEN_MPI

STOPPED = """
import os, signal
from hpcdl.cluster.environment import placement
from hpcdl.rank import main as rank
rank.START_S = 2.0
if placement().rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
rank.leave(rank.supervised(lambda communicator, watch: None, 1.0))
"""

GRAPH = """Graph execution error:

Detected at node functional_1/probe_1/PyFunc defined at (most recent call last):
  File "rank.py", line 1, in <module>
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (HpcdlError("no room; add some"), "no room; add some"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (
            ValueError("Exception encountered when calling Net.call().\n\n\x1b[1mInput 0 does not fit\x1b[0m\n\nmore"),
            "ValueError: Input 0 does not fit",
        ),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (
            OSError(f"{GRAPH}ValueError: planted\nTraceback\n\t [[{{{{node x}}}}]]"),
            "OSError: ValueError: planted",
        ),
        (RuntimeError(f"{GRAPH}OOM when allocating\n\t [[{{{{node x}}}}]]"), "RuntimeError: OOM when allocating"),
        (
            RuntimeError(f"{GRAPH}no such kernel\n\t [[{{{{node x}}}}]]\n\tfailed\n\t [[while/body/f]] [Op:f]"),
            "RuntimeError: no such kernel",
        ),
    ],
)
def test_the_line_that_says_most(error: BaseException, line: str) -> None:
    assert one_line(error) == line


def test_a_lost_peer_behind_tensorflow_is_no_cause() -> None:
    error = RuntimeError(f"{GRAPH}RankError: rank 1 on node: MPI failed in wait: process_vm_readv failed (errno 3)")
    assert verdict(error)[0] == "bereaved"
    assert verdict(RuntimeError(f"{GRAPH}ValueError: planted"))[0] == "failed"


@pytest.mark.mpi
@pytest.mark.parametrize("library", ["", pytest.param(str(DEBIAN_OPEN_MPI), marks=pytest.mark.lab("open-mpi"))])
def test_a_rank_that_is_stopped_before_mpi_has_started_is_named(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is stopped before MPI has started is named, while the others wait inside the library.

    No Python code could run there while the library held the lock.
    """
    if library:
        monkeypatch.setenv("MPI4PY_LIBMPI", library)
    plan = LaunchPlan(num_ranks=3, ranks_per_node=3)
    with pytest.raises(RankError, match=r"rank 1 .* is not responding .* in starting MPI"):
        supervise.start(find_launcher(), plan, [sys.executable, "-c", STOPPED], folder=tmp_path / "ranks")

"""The local launcher with real processes and the current mpiexec; the ranks are small scripts without TensorFlow."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.cluster import supervise as local
from hpcdl.cluster.deaths import DeathWatch
from hpcdl.cluster.launchers import find_launcher, load_launcher
from hpcdl.cluster.launchers.base import Casualty
from hpcdl.cluster.status import StatusReport, read_statuses, report_all
from hpcdl.core.errors import HpcdlError, Interrupted, RankError, StoppedEarly
from hpcdl.core.protocols import LaunchPlan
from tests.conftest import patience

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
from hpcdl.cluster.deaths import hold_line
from hpcdl.cluster.environment import placement
from hpcdl.cluster.status import StatusReport, report_all
from hpcdl.comm.mpi.communicator import world
place, folder = placement(), Path(os.environ["HPCDL_STATUS_DIR"])
report = StatusReport(folder=folder, rank=place.rank, line=hold_line(os.environ["HPCDL_LAUNCH"]))
report.publish("running")
"""
WITH_MPI = """
communicator = world(place.size)
processes = communicator.allgather_json((communicator.host, os.getpid()))
if place.rank == 0: report_all(folder, "running", processes)
"""


def start(
    body: str,
    tmp_path: Path,
    num_ranks: int = 2,
    tick: Callable[[], None] = lambda: None,
    *,
    warn: Callable[[str], None] = lambda text: None,
    before_mpi: bool = False,
) -> Path:
    script = tmp_path / "rank.py"
    script.write_text(PREAMBLE + ("" if before_mpi else WITH_MPI) + textwrap.dedent(body))
    plan = LaunchPlan(num_ranks=num_ranks, ranks_per_node=num_ranks)
    local.start(find_launcher(), plan, [sys.executable, str(script)], folder=tmp_path / "ranks", tick=tick, warn=warn)
    return tmp_path / "ranks"


@pytest.mark.mpi
def test_ranks_that_finish_are_in_one_table(tmp_path: Path) -> None:
    folder = start(
        "communicator.barrier(); report.publish('done')\nif place.rank == 0: report_all(folder, 'done', processes)",
        tmp_path,
        3,
    )
    assert [(status.rank, status.state) for status in read_statuses(folder)] == [(rank, "done") for rank in range(3)]
    assert sorted(path.name for path in folder.iterdir()) == ["all.json", "launcher.log"]


@pytest.mark.mpi
def test_a_folder_that_is_moved_while_ranks_run_is_reported(tmp_path: Path) -> None:
    moved = """
    communicator.barrier()
    if place.rank == 0: folder.rename(str(folder) + '-moved')
    time.sleep(3)
    report.publish('done')
    """
    said: list[str] = []
    with pytest.raises(HpcdlError, match=r"was moved or removed while its ranks ran: .* --resume"):
        start(moved, tmp_path, warn=said.append)
    assert len(said) == 1 and "was moved or removed while its ranks run: from now on they save" in said[0]


@pytest.mark.mpi
def test_a_full_disk_is_named_where_it_may_have_ended_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpiexec ends them where their words find no place in its log."""

    def full(**_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(local.tempfile, "TemporaryFile", full)
    with pytest.raises(RankError, match=r"ended without a word .* cannot write .*ranks: Disk quota exceeded") as caught:
        start("if place.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncommunicator.barrier()", tmp_path)
    assert caught.value.lost


@pytest.mark.mpi
def test_a_rank_that_dies_before_there_is_a_table_is_named(tmp_path: Path) -> None:
    """A rank that dies before the table of ranks exists is named by its line; the first cut line is the first death."""
    body = "if place.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncommunicator.barrier()"
    with pytest.raises(RankError, match=r"rank 1 on .* ended without a word"):
        start(body.replace("communicator.barrier()", "time.sleep(60)"), tmp_path, before_mpi=True)
    assert not (tmp_path / "ranks" / "all.json").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("body", "lost"), [("os.kill(os.getpid(), 9)", True), ("sys.exit(1)", False)])
def test_ranks_killed_before_their_first_message_are_lost(
    tmp_path: Path, num_ranks: int, body: str, *, lost: bool
) -> None:
    """Ranks killed before their first message are lost, so new ones may start; a program that cannot start is not."""
    plan = LaunchPlan(num_ranks=num_ranks, ranks_per_node=num_ranks)
    words = [sys.executable, "-c", f"import os, sys; {body}"]
    with pytest.raises(RankError, match="before all ranks had started" if lost else "never started") as caught:
        local.start(find_launcher(), plan, words, folder=tmp_path / "ranks")
    assert caught.value.lost == lost


@pytest.mark.mpi
def test_a_rank_that_raises_is_named_and_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 on \S+: no luck") as caught:
        start(
            """
            if place.rank == 1:
                report.publish("failed", exit_code=3, message="no luck")
                communicator.abort(3)
            communicator.barrier()
            """,
            tmp_path,
        )
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    assert time.monotonic() - began < patience(10)


@pytest.mark.mpi
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 on .* ended without a word") as caught:
        start(
            "if place.rank == 1: time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\ncommunicator.barrier()",
            tmp_path,
        )
    assert caught.value.rank == 1
    assert time.monotonic() - began < patience(10)


@pytest.mark.mpi
@pytest.mark.parametrize("asked", [False, True])
def test_only_a_rank_that_nobody_asked_to_stop_is_lost(tmp_path: Path, asked: bool) -> None:
    """A rank counts as lost only if it was not asked to stop: else --elastic would restart a run that the user ends."""

    def tick() -> None:
        for status in read_statuses(tmp_path / "ranks")[1:2]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(os.getpid() if asked else status.pid, signal.SIGTERM)

    with pytest.raises((RankError, Interrupted)) as caught:
        start("time.sleep(60)", tmp_path, tick=tick)
    assert getattr(caught.value, "lost", False) is not asked


@pytest.mark.mpi
def test_who_kills_the_ranks_by_a_second_signal_is_not_reported_a_crash(tmp_path: Path) -> None:
    def tick() -> None:
        if len(read_statuses(tmp_path / "ranks")) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped at once by a second signal"):
        start("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", tmp_path, tick=tick)


@pytest.mark.mpi
def test_ranks_that_stop_early_say_so(tmp_path: Path) -> None:
    with pytest.raises(StoppedEarly, match="saved at step 5"):
        start(
            """
            report.publish("stopped", filed=place.rank == 0, exit_code=75, message="saved at step 5")
            communicator.barrier()
            sys.exit(75)
            """,
            tmp_path,
        )


def test_deaths_are_seen_in_their_order() -> None:
    first, second = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    watch = DeathWatch("two")
    watch.add(first.pid)
    watch.add(second.pid)
    assert watch.poll(0.05) == []
    second.kill()
    assert watch.poll(5) == [second.pid]
    first.send_signal(signal.SIGTERM)
    assert watch.poll(5) == [first.pid]
    watch.close()
    first.wait()
    second.wait()


def test_who_lets_go_of_its_files_first_died_first() -> None:
    """The first process to close its files died first, even if the kernel reaps it after its victims."""
    program = "import os, time; from hpcdl.cluster.deaths import hold_line; hold_line('lines'); print(flush=True)\n"
    dying = program + "input(); os.closerange(3, 1024); time.sleep(60)"
    watch = DeathWatch("lines")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.closing(watch), contextlib.ExitStack() as ending:
        first, second = (
            ending.enter_context(subprocess.Popen([sys.executable, "-c", text], **pipes))  # type: ignore[call-overload]
            for text in (dying, program + "time.sleep(60)")
        )
        ending.callback(first.kill)
        ending.callback(second.kill)
        for process in (first, second):
            process.stdout.readline()
            watch.add(process.pid)
        assert watch.poll(0.05) == []  # accepts both
        first.stdin.write(b"\n")
        first.stdin.flush()
        assert watch.poll(20) == [first.pid]
        second.kill()
        assert watch.poll(20) == [second.pid]
        first.kill()
        assert watch.poll(0.2) == []  # once per process


def test_who_dies_at_its_start_is_reported_before_who_is_killed_for_it() -> None:
    """A process that dies at start is reported before those killed for it, even if all reach the watch at once."""
    program = "import sys; from hpcdl.cluster.deaths import hold_line; hold_line('start'); print(flush=True); input()"
    line = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    watch = DeathWatch("start")
    with contextlib.closing(watch), subprocess.Popen(line, **pipes) as other:  # type: ignore[call-overload]
        other.stdout.readline()
        assert watch.poll(0.05) == []  # accepts it
        with subprocess.Popen(line, **pipes) as dying:  # type: ignore[call-overload]
            dying.stdout.readline()
            dying.kill()
        other.kill()
        other.wait()
        assert [*watch.poll(5), *watch.poll(0.2)] == [dying.pid, other.pid]


def test_the_first_dead_is_known_though_all_end_in_one_tick(tmp_path: Path) -> None:
    launcher, *ranks = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(4))
    report_all(tmp_path, "running", [(socket.gethostname(), process.pid) for process in ranks])

    def tick() -> None:
        for process in (ranks[1], ranks[0], ranks[2], launcher):
            process.kill()
            process.wait()

    chatter = local._Chatter(load_launcher("local"), tmp_path / "launcher.log", 0)
    watcher = local._Watcher([launcher], tmp_path, "no launch", DeathWatch("no launch"), tick, chatter)
    watcher.wait()
    assert watcher.casualty() == Casualty(host=socket.gethostname(), pid=ranks[1].pid)


def test_a_damaged_status_is_left_out(tmp_path: Path) -> None:
    StatusReport(folder=tmp_path, rank=0).publish("failed")
    (tmp_path / "1.json").write_text("{")
    (found,) = read_statuses(tmp_path)
    assert (found.rank, found.pid) == (0, os.getpid())
    (tmp_path / "all.json").write_text('{"state": "running", "at": 1, "processes": {"here": {"x": 1}}}')
    assert len(read_statuses(tmp_path)) == 1

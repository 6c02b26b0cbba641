"""Clocks that are set during a run, and runs that are stopped for a while, change no number and blame no rank."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.comm.observed import PARTS
from hpcdl.trace.file import read_trace
from tests.conftest import CommandLine, family, finish, patience, send
from tests.training_runs import events, record_of, start, steps_done, wait_for

HERE = Path(__file__).parent
BATCH, STEPS, SET_S = 8, 60, 300
LINE = [
    "train", "--model", "emulated:lenet:0.05", "--data", "synthetic:mnist@400", "--batch-size", BATCH,
    "--profile", "none", "--checkpoint-every", "1s",
]  # fmt: skip
LONG_S = 100.0
"""Seconds, longer than any step takes, and shorter than the change of the clock."""
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is missing: apt-get install gcc libc6-dev"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clock") / "stepped_clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", path, HERE / "stepped_clock.c"], check=True)
    return path


def stepped(library: Path, file: Path, seconds: float, rank: int | None = None) -> dict[str, str]:
    """Return the environment of a run whose clock (that of `rank`, if given) jumps by `seconds` once `file` exists."""
    only = {} if rank is None else {"STEPPED_RANK": str(rank)}
    return {"LD_PRELOAD": str(library), "STEPPED_FILE": str(file), "STEPPED_BY": str(seconds), **only}


def check_numbers(run_dir: Path, how: str) -> dict[str, Any]:
    """Assert that a record's times are consistent, and that its time stamps and the journal's advance evenly."""
    record = record_of(run_dir)
    assert [text for text in record["warnings"] if f"was set {how} by " in text] == record["warnings"][-1:]
    workers = [rank for rank in record["rank_records"] if rank["role"] == "worker"]
    for rank in workers:
        assert all(-1e-5 <= seconds < LONG_S for seconds in rank["parts"].values()), rank
    steps_s = record["step_seconds"]
    assert min(steps_s) > 0 and max(steps_s) < LONG_S and sum(steps_s) <= record["seconds_total"] + 1
    usual = len(workers) * BATCH / statistics.median(steps_s)
    assert 0.4 * usual < record["images_per_second"] < 2.5 * usual, (record["images_per_second"], usual)
    assert record["imbalance_seconds"] < SET_S / STEPS / 4
    lines = [event for kind in ("start", "step", "epoch") for event in events(run_dir, kind)]
    lines.sort(key=lambda event: event["monotonic_s"])
    for sooner, later in itertools.pairwise(lines):
        passed_s = later["monotonic_s"] - sooner["monotonic_s"]
        assert later["at"] - sooner["at"] == pytest.approx(passed_s, abs=0.01)
    assert not [event for event in events(run_dir, "message") if "times as long as" in event["text"]]
    return record


def check_trace(run_dir: Path, ranks: int) -> None:
    """Assert that the parts of all steps follow each other, and that nothing lasts as long as the clock's change."""
    for rank in range(ranks):
        trace = read_trace(run_dir / "trace" / f"rank-{rank}.trace")
        records = trace.records
        assert len(records) and (records["end_s"] - records["begin_s"]).max() < LONG_S
        parts = records[numpy.isin(records["name"], [trace.code(name) for name in PARTS])]
        borders = parts[parts["step"].argsort(kind="stable")]
        assert (borders["begin_s"][1:] - borders["begin_s"][:-1]).min() > -1.0


CASES: Mapping[str, tuple[list[Any], int, int | None]] = {
    "ring, ahead": (["--strategy", "ring", "--ranks", 2, "--trace", "full"], SET_S, None),
    "easgd, one worker's back": (["--strategy", "easgd", "--ranks", 3], -SET_S, 1),
    "ring, one worker's ahead": (["--strategy", "ring", "--ranks", 2, "--trace", "full"], SET_S, 1),
    "ring, back": (["--strategy", "ring", "--ranks", 2, "--trace", "full"], -SET_S, None),
    "several steps a call": (["--strategy", "single", "--trace", "full"], -SET_S, None),
    "a center everywhere": (["--strategy", "sync-easgd", "--ranks", 2], SET_S, 1),
    "servers": (["--strategy", "ps-sync", "--ranks", 3], -SET_S, 1),
    "deterministic": (["--strategy", "ring", "--ranks", 2, "--deterministic"], -SET_S, 1),
}
EVERY_TIME = ("ring, one worker's ahead",)
MARKED = [pytest.param(case, marks=[pytest.mark.soak] * (case not in EVERY_TIME)) for case in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_a_clock_that_is_set_moves_no_number(
    session_hpcdl: CommandLine, library: Path, tmp_path: Path, case: str
) -> None:
    words, seconds, rank = CASES[case]
    run_dir, file = tmp_path / "run", tmp_path / "now"
    line = [*LINE, *words, "--steps", STEPS, "--stall-timeout", f"{patience(8):.0f}s", "--run-dir", run_dir]
    process = start(session_hpcdl, line, stepped(library, file, seconds, rank))
    wait_for(lambda: steps_done(run_dir) > STEPS / 5 or process.poll() is not None)
    file.touch()
    finished = finish(process)
    assert finished.code == 0, finished.err
    record = check_numbers(run_dir, "ahead" if seconds > 0 else "back")
    assert [*(run_dir / "checkpoints").glob("step-*")], "no checkpoint by the interval"
    (listed,) = session_hpcdl(["runs", run_dir, "--json"]).json()["runs"]
    assert listed["images_per_second"] == pytest.approx(record["images_per_second"], rel=0.01)
    if "--trace" in words:
        check_trace(run_dir, record["ranks"])
        found = session_hpcdl(["trace", run_dir, "--json"]).json()
        assert all(one["seconds_per_step"] < SET_S / STEPS / 4 for one in found["stragglers"]), found["stragglers"]
        assert all(abs(clock["offset_s"]) < 1 for clock in found["clock"]), found["clock"]


@pytest.mark.soak
def test_a_script_s_clock_that_is_set_moves_no_number(
    session_hpcdl: CommandLine, library: Path, tmp_path: Path
) -> None:
    """A script's clock that is set changes no number; by less, because TensorFlow's own waits follow that clock.

    `make test-all` shows it for trainings.
    """
    run_dir, file = tmp_path / "run", tmp_path / "now"
    line = ["run", "--ranks", "2", "--run-dir", run_dir, HERE.parent / "scripts" / "clocked_script.py", file]
    finished = session_hpcdl(line, env=stepped(library, file, -30))
    assert finished.code == 0, finished.err
    record = record_of(run_dir)
    assert record["warnings"][-1].endswith("continue as if it had not been"), record["warnings"]
    steps_s = record["step_seconds"]
    assert min(steps_s) > 0 and statistics.median(steps_s) > 0.03 and max(steps_s) < LONG_S
    assert 0 < record["images_per_second"] < 2 * BATCH / 0.03 and record["seconds_total"] > len(steps_s) * 0.03
    check_trace(run_dir, 2)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [SET_S, -SET_S])
def test_a_clock_that_is_set_moves_no_time_limit(
    session_hpcdl: CommandLine, library: Path, tmp_path: Path, seconds: int
) -> None:
    """A clock that is set moves no time limit; `make test-all` runs test_a_clock_that_is_set_moves_no_number."""
    run_dir, file, limit_s = tmp_path / "run", tmp_path / "now", round(patience(20))
    line = [*LINE, "--strategy", "ring", "--ranks", 2, "--steps", 100_000, "--time-limit", f"{limit_s}s"]
    process = start(session_hpcdl, [*line, "--run-dir", run_dir], stepped(library, file, seconds))
    wait_for(lambda: steps_done(run_dir) > STEPS / 5 or process.poll() is not None)
    file.touch()
    set_s = time.monotonic()
    finished = finish(process)
    assert finished.code == 75 and "the time limit" in finished.err, finished.err
    trained_s = events(run_dir, "step")[-1]["seconds"]
    assert limit_s / 2 < trained_s < limit_s + 5 and time.monotonic() - set_s < limit_s + patience(20)


def test_a_run_that_was_suspended_continues_and_blames_nobody(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """All processes of a run are stopped, as in a paused virtual machine; it continues and blames no rank."""
    run_dir, stall_s = tmp_path / "run", patience(4)
    line = [*LINE, "--strategy", "ring", "--ranks", 2, "--steps", 2 * STEPS, "--stall-timeout", f"{stall_s:.0f}s"]
    process = start(session_hpcdl, [*line, "--run-dir", run_dir])
    wait_for(lambda: steps_done(run_dir) > STEPS / 5 or process.poll() is not None)
    pids = [*family(process.pid)]
    assert len(pids) > 2
    send(signal.SIGSTOP, pids)
    time.sleep(stall_s + 1)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    finished = finish(process)
    assert finished.code == 0, finished.err
    assert not [text for event in events(run_dir, "message") if "rank" in (text := event["text"])]
    found = session_hpcdl(["trace", run_dir, "--json"]).json()
    assert all(one["seconds_per_step"] < stall_s / STEPS / 4 for one in found["stragglers"]), found["stragglers"]

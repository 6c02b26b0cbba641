"""No process outlives the one that started it, and a run directory has one writer; real ranks, both MPIs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdl.cluster.processes import end_marked, marked
from hpcdl.cluster.status import read_statuses
from hpcdl.cluster.supervise import LAUNCH_VARIABLE
from tests.conftest import CommandLine, Mpi, command_line, patience
from tests.training_runs import SHORT, finish, start, steps_done, wait_for

pytestmark = pytest.mark.mpi
ENDLESS = [*SHORT, "--epochs", "500"]


def mark_of(run_dir: Path) -> str:
    """Return the mark that all processes of a launch carry in their environment."""
    pid = read_statuses(run_dir / "ranks")[0].pid
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith(f"{LAUNCH_VARIABLE}="))


def shared_by(mark: str) -> set[Path]:
    """Return the files in /dev/shm that a launch's processes have mapped."""
    lines = [
        line for pid in marked(LAUNCH_VARIABLE, mark) for line in Path(f"/proc/{pid}/maps").read_text().split("\n")
    ]
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory; ranks that outlive the test are killed."""
    path = tmp_path / "run"
    yield path
    for status in read_statuses(path / "ranks"):
        if os.fsencode(path) in command_line(status.pid):
            os.kill(status.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "strategy",
    ["async-easgd", *(pytest.param(name, marks=pytest.mark.soak) for name in ("ring", "single", "grpc-ring"))],
)
def test_ranks_end_with_a_launcher_that_is_killed(mpi: Mpi, shards: Path, run_dir: Path, strategy: str) -> None:
    """Workers and a server end with a killed launcher, and so do the copies of their state in memory."""
    near = run_dir.with_name("near")
    near.mkdir()
    arguments = ["train", "--model", "lenet", "--strategy", strategy, "--ranks", "1" if strategy == "single" else "3"]
    arguments += ["--batch-size", "16", "--epochs", "500", "--profile", "none", "--data", str(shards)]
    arguments += ["--run-dir", str(run_dir), *(["--allow-grpc"] if strategy == "grpc-ring" else [])]
    keeps = strategy != "single"
    if keeps:
        arguments += ["--elastic", "--checkpoint-every", "1h", "--local-checkpoint-every", "5"]
        arguments += ["--local-checkpoint-folder", str(near)]
    process = start(mpi.hpcdl, arguments)
    wait_for(
        lambda: (steps_done(run_dir) > 3 and any(near.glob("*/step-*.json")) is keeps) or process.poll() is not None
    )
    assert process.poll() is None, process.communicate()
    mark = mark_of(run_dir)
    shared = shared_by(mark)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + patience(10)
    try:
        while marked(LAUNCH_VARIABLE, mark):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        end_marked(LAUNCH_VARIABLE, mark)
    assert not [path for path in shared if path.exists()]
    wait_for(lambda: not any(near.iterdir()), timeout_s=30)


def test_a_second_writer_is_refused_and_names_the_first(mpi: Mpi, shards: Path, run_dir: Path) -> None:
    process = start(mpi.hpcdl, [*ENDLESS, "--data", shards, "--run-dir", run_dir])
    wait_for(lambda: steps_done(run_dir) > 3 or process.poll() is not None)
    before = (run_dir / "run.toml").read_bytes()
    under_launcher = [*mpi.launcher, "-n", "2"]
    for resume in ([], ["--resume"]):
        second = mpi.hpcdl([*ENDLESS, "--data", shards, "--run-dir", run_dir, "--seed", "7", *resume])
        assert (second.code, len(second.err.splitlines())) == (2, 1), second.err
        assert f"(pid {process.pid} on {socket.gethostname()})" in second.err
    foreign = start_under(under_launcher, mpi, [*ENDLESS[:5], "--data", shards, "--run-dir", run_dir, "--resume"])
    assert f"(pid {process.pid} on {socket.gethostname()})" in foreign
    assert (run_dir / "run.toml").read_bytes() == before
    process.terminate()
    assert finish(process).code == 75


def start_under(launcher: list[str], mpi: Mpi, arguments: list[object]) -> str:
    """Return hpcdl's error lines of `hpcdl ARGUMENTS` as ranks of another launcher."""
    line = [*launcher, sys.executable, "-m", "hpcdl", *map(str, arguments)]
    done = subprocess.run(line, env=mpi.environment, cwd=mpi.hpcdl.home, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    return "\n".join(text for text in done.stderr.splitlines() if text.startswith("hpcdl: "))


@pytest.mark.parametrize("nohup", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_terminal_that_closes_stops_a_run_unless_nohup(
    session_hpcdl: CommandLine, shards: Path, run_dir: Path, nohup: bool
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        process = start(session_hpcdl, [*SHORT, "--epochs", "3", "--data", shards, "--run-dir", run_dir])
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(lambda: steps_done(run_dir) > 3 or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    finished = finish(process)
    assert finished.code == (0 if nohup else 75), finished.err
    record = json.loads((run_dir / "record.json").read_text())
    assert (record["status"] == "finished") is nohup

"""A run on a small real file system that is full for a while."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import CommandLine, Undisturbed, patience
from tests.training_runs import NOTED, finish, record_of, same_run, steps_done, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.lab("mounts")]
MOUNTED = """
set -e
mount -t tmpfs -o size=3m tmpfs "$1"
code=0
shift 2 && "$@" || code=$?
cp -r "$DISK/run" "$KEPT"
exit $code
"""
"""Run a command in a mount namespace of its own, and copy the run out of it at the end."""


def fill(folder: Path) -> Path:
    """Fill the disk completely."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass
    return ballast


def test_a_disk_that_fills_up_costs_warnings_only(
    undisturbed: Undisturbed, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    command = [*NOTED, "--data", shards, "--run-dir", disk / "run"]
    command += ["--checkpoint-every", "0.3s", "--keep-checkpoints", "2"]
    process = subprocess.Popen(
        ["unshare", "-m", "bash", "-c", MOUNTED, "run", disk, "--", sys.executable, "-m", "hpcdl", *map(str, command)],
        env=session_hpcdl.environment | {"STEP_S": "0.03", "DISK": str(disk), "KEPT": str(kept)},
        cwd=session_hpcdl.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    inside = Path(f"/proc/{process.pid}/root{disk}")
    wait_for(lambda: (checkpoints(inside) and steps_done(inside / "run") > 60) or process.poll() is not None)
    ballast = fill(inside)
    time.sleep(min(patience(1.5), 3.0))  # long enough for checkpoints to become due, short enough for steps to remain
    good = checkpoints(inside)
    step = steps_done(inside / "run")
    ballast.unlink()
    wait_for(lambda: not good & checkpoints(inside) or process.poll() is not None)
    finished = finish(process, timeout_s=300)
    assert finished.code == 0, finished.err
    assert good, "the last good checkpoint stays while there is no room"
    record = record_of(kept)
    (first, *_) = [warning for warning in record["warnings"] if "no checkpoint at step" in warning]
    assert "No space left on device" in first
    assert finished.err.count(f"warning: {first}") == 1  # printed when it happened, or as soon as there was space again
    assert step < 264, "the disk was full while steps were still to be taken"
    same_run(kept, undisturbed.run_dir)


def checkpoints(inside: Path) -> set[str]:
    """Return the names of the finished checkpoints."""
    return {path.name for path in (inside / "run" / "checkpoints").glob("step-*")}

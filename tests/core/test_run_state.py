"""The state of a run follows from its record and the holders of its locks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcdl.core.records.run_record import RANKS, is_measured, state_of
from hpcdl.core.storage.lock import FILE_NAME, writing


def lock_of(run_dir: Path, **holder: object) -> Path:
    """Write a lock left by a killed process, or held invisibly by a process on another host."""
    path = run_dir / FILE_NAME
    path.write_text(json.dumps(holder))
    return path


def test_a_run_that_nobody_writes_is_lost_and_looking_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / RANKS).mkdir()
    assert state_of(tmp_path, "running") == "lost"
    lock_of(tmp_path, host=os.uname().nodename, pid=os.getpid(), job="")  # another process has this number by now
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}
    assert state_of(tmp_path, "running") == state_of(tmp_path) == "lost"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))} == before
    assert [state_of(tmp_path, status) for status in ("finished", "stopped", "failed")] == [
        "finished", "stopped", "failed",
    ]  # fmt: skip


@pytest.mark.parametrize("below", ["", RANKS])
def test_a_run_whose_lock_is_held_continues(tmp_path: Path, below: str) -> None:
    """A run continues while its lock is held, by the process that started it or, after its end, by rank 0."""
    (tmp_path / below).mkdir(exist_ok=True)
    hold = "import sys, time; from pathlib import Path; from hpcdl.core.storage.lock import writing\n"
    hold += "with writing(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", hold, str(tmp_path / below)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        states = [state_of(tmp_path, status) for status in ("running", "stopped", "finished")]
        assert states == ["running", "starting", "finished"]
        holder.kill()
        holder.wait()
    assert state_of(tmp_path, "running") == "lost"
    with writing(tmp_path):
        pass


def test_messages_about_another_host_state_only_what_is_known(tmp_path: Path) -> None:
    lock_of(tmp_path, host="n17", pid=1, job="")
    (tmp_path / "metrics.jsonl").touch()
    found = state_of(tmp_path, "running")
    assert found == "running (not verified: on n17)" and not is_measured(found)
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 7200,) * 2)
    assert state_of(tmp_path, "running") == "lost"

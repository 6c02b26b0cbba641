"""What a failed test shows: the stacks of a command that exceeded its time limit, and what its runs left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import evidence_below, family, finish, program_of

STUCK = """
import subprocess, sys, time
def child_sleeps():
    print("asleep", flush=True)
    time.sleep(600)
def parent_waits():
    subprocess.run([sys.executable, "-X", "faulthandler", __file__, "child"])
child_sleeps() if "child" in sys.argv else parent_waits()
"""


def test_a_command_that_takes_too_long_says_where_each_process_stood(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    line = [sys.executable, "-X", "faulthandler", str(tmp_path / "stuck.py")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "asleep\n"
    processes = list(family(process.pid))
    assert len(processes) == 2
    with pytest.raises(pytest.fail.Exception, match=r"not done after \d+ s") as caught:
        finish(process, timeout_s=0.1)
    assert "in child_sleeps" in str(caught.value) and "in parent_waits" in str(caught.value)
    assert not any(map(program_of, processes))


def test_what_a_run_left_is_reported_but_not_what_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    (tmp_path / "run" / "launcher.log").write_text("mpiexec said so\n")
    (tmp_path / "run" / "ranks" / "0.json").write_text('{"word": "last"}')
    reported = evidence_below(tmp_path, since_s=0.0)
    assert "mpiexec said so" in reported and '"last"' in reported
    assert evidence_below(tmp_path, since_s=(tmp_path / "run" / "launcher.log").stat().st_mtime + 100) == ""

"""Progress is a bar on a terminal, and a line per minute in a log."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from hpcdl.core import progress as module
from hpcdl.core.progress import BarProgress, LineProgress, NullProgress, progress
from tests.conftest import CommandLine

SHORT = ["train", "--model", "lenet", "--data", "synthetic:mnist@64", "--steps", "2", "--batch-size", "8"]


class Clock:
    """A fake monotonic clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_log_gets_a_line_a_minute_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with progress("training", 1000) as bar:
        assert isinstance(bar, LineProgress)
        for step in range(400, 581):  # resumed at step 400, with one step per second
            bar.update(step, f"step {step}")
            clock.now_s += 1
    reported = capsys.readouterr().err.splitlines()
    assert reported == [
        "training: 46 %, step 460, 9m 00s left",
        "training: 52 %, step 520, 8m 00s left",
        "training: 58 %, step 580, 7m 00s left",
    ]


def test_a_terminal_gets_one_line_that_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert isinstance(progress("training", 10), BarProgress)
        assert isinstance(progress("training", 10, enabled=False), NullProgress)
    os.close(leader)


@pytest.mark.long
def test_quiet_leaves_the_result_alone(ask_hpcdl: CommandLine) -> None:
    loud = ask_hpcdl([*SHORT, "--run-dir", "loud"])
    quiet = ask_hpcdl([*SHORT, "-q", "--run-dir", "quiet"])
    assert (loud.code, quiet.code) == (0, 0), quiet.err
    assert "epoch" in loud.err and "next: " in loud.err
    assert all(line.startswith("warning: ") for line in quiet.err.splitlines()) and quiet.out.startswith(
        "quiet: 2 steps on 1 worker"
    )

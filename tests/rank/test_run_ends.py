"""Every end of a run is in its record, and nothing of the run stays behind; real processes, as a user sees them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcdl.checkpoint.folders import FOLDER, list_checkpoints
from tests.conftest import CommandLine, Mpi, patience
from tests.training_runs import events, finish, kill_rank, record_of, start, steps_done, wait_for

pytestmark = pytest.mark.mpi
TRAIN = ["train", "--model", "lenet", "--data", "synthetic:mnist@400", "--batch-size", "16", "--profile", "none"]
RING = [*TRAIN, "--strategy", "ring", "--ranks", "2"]
FAILING = (
    "import sys, hpcdl\nhpcdl.init()\nif sys.argv[1] == 'raise' and hpcdl.rank() == 1: raise ValueError('of mine')\n"
)
FAILING += "if sys.argv[1] == 'exit': sys.exit(3)\n"


def ended(hpcdl: CommandLine, run_dir: Path) -> tuple[str, str]:
    """Return status and message of a record; `hpcdl runs` must show the same status."""
    reported = json.loads(hpcdl(["runs", run_dir, "--json"]).out)["runs"]
    record = record_of(run_dir)
    assert [run["status"] for run in reported] == [record["status"]]
    assert record["finished_at"]
    return record["status"], record["message"]


def epochs_in(run_dir: Path) -> list[float]:
    """Return the epochs that the journal holds."""
    return [event["epoch"] for event in events(run_dir, "epoch")]


def test_a_run_that_is_stopped_or_loses_a_rank(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_hpcdl, [*RING, "--steps", "100000", "--run-dir", run_dir])
    wait_for(lambda: epochs_in(run_dir) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    status, message = ended(run_hpcdl, run_dir)
    assert status == "stopped" and message.startswith("stopped by a signal after step ")
    kept = record_of(run_dir)
    assert kept["steps"] == list_checkpoints(run_dir / FOLDER)[0]
    assert kept["history"] and [point["epoch"] for point in kept["history"]] == epochs_in(run_dir)
    refused = run_hpcdl([*RING, "--resume", "--run-dir", run_dir, "--batch-size", "8"])
    assert refused.code == 2 and record_of(run_dir) == kept
    process = start(run_hpcdl, [*RING, "--steps", "100000", "--resume", "--run-dir", run_dir])
    wait_for(lambda: steps_done(run_dir) > kept["steps"] or process.poll() is not None)
    kill_rank(run_dir, 1)
    assert finish(process).code == 1
    status, message = ended(run_hpcdl, run_dir)
    assert status == "failed" and message.startswith("rank 1 on ")
    epochs = [point["epoch"] for point in record_of(run_dir)["history"]]
    assert epochs == sorted({*epochs_in(run_dir)})  # an epoch that the second start trained again counts once


def test_nothing_is_left_of_a_run_whose_launcher_is_killed(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    run_dir, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    arguments = [*TRAIN, "--strategy", "ps", "--ranks", "3", "--steps", "100000", "--run-dir", run_dir]
    process = start(run_hpcdl, arguments, env={"TMPDIR": str(temporary)})
    wait_for(lambda: steps_done(run_dir) > 1 or process.poll() is not None)
    assert len([*temporary.glob("hpcdl-trace-*")]) == 3
    process.kill()
    process.communicate()
    deadline = time.monotonic() + patience(25)
    while any(temporary.glob("hpcdl-*")) or record_of(run_dir)["status"] == "running":
        assert time.monotonic() < deadline, [*temporary.iterdir()]
        time.sleep(0.2)
    assert ended(run_hpcdl, run_dir)[0] == "lost"
    assert sorted(path.name for path in (run_dir / "trace").iterdir()) == [f"rank-{rank}.trace" for rank in range(3)]


@pytest.mark.long
def test_a_run_that_was_killed_whole_leaves_nothing_once_it_is_taken_up(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A run whose processes were all killed, the one that cleans up too, leaves nothing after its resume."""
    run_dir, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    arguments, own = [*RING, "--run-dir", run_dir], {"TMPDIR": str(temporary)}
    process = start(run_hpcdl, [*arguments, "--steps", "100000"], env=own)
    wait_for(lambda: steps_done(run_dir) > 1 or process.poll() is not None)
    mark, before = f"TMPDIR={temporary}".encode(), [*temporary.glob("hpcdl-trace-*")]
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or ended
            if mark in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
    process.communicate()
    assert len(before) == 2 and before == [*temporary.glob("hpcdl-trace-*")]
    again = run_hpcdl([*arguments, "--steps", "4", "--resume"], env=own)
    assert again.code == 0, again.err
    assert not [*temporary.glob("hpcdl-trace-*")]


def _rank_programs(run_dir: Path) -> int:
    """Return the number of processes that were started as ranks of the run's script."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes().decode(errors="replace").split("\0")
            found += "python" in words[0] and "hpcdl.scripts.process.script" in words and str(run_dir) in words
    return found


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_stopped_before_its_ranks_have_reported(
    run_hpcdl: CommandLine, tmp_path: Path, number: signal.Signals
) -> None:
    """A signal before a script's ranks have reported stops them as soon as they do, and does not look like a crash."""
    script, run_dir = tmp_path / "mine.py", tmp_path / "run"
    script.write_text(FAILING)
    process = start(run_hpcdl, ["run", "--ranks", "2", "--profile", "none", "--run-dir", run_dir, script, "none"])
    wait_for(lambda: _rank_programs(run_dir) > 1 or process.poll() is not None)
    process.send_signal(number)
    ended_so = finish(process)
    assert ended_so.code == 130
    assert ended_so.err.splitlines()[-1].startswith("hpcdl: ") and "stopped by a signal" in ended_so.err
    assert "without a word" not in ended_so.err


@pytest.mark.parametrize(("how", "code", "words"), [("raise", 1, "ValueError: of mine"), ("exit", 3, "sys.exit(3)")])
def test_a_script_that_fails(run_hpcdl: CommandLine, tmp_path: Path, how: str, code: int, words: str) -> None:
    script, run_dir = tmp_path / "mine.py", tmp_path / "run"
    script.write_text(FAILING)
    assert run_hpcdl(["run", "--ranks", "2", "--profile", "none", "--run-dir", run_dir, script, how]).code == code
    status, message = ended(run_hpcdl, run_dir)
    assert status == "failed" and words in message


@pytest.mark.long
def test_an_exploding_run_says_how_to_go_back(mpi: Mpi, tmp_path: Path) -> None:
    """The error of a diverging run gives the command to go back.

    It does so under another launcher too, where no process of hpcdl is left to write the record.
    """
    run_dir = tmp_path / "a run"
    arguments = [*TRAIN, "--strategy", "ring", "--steps", "6", "--checkpoint-every", "0.01s", "--run-dir", str(run_dir)]
    command = [*mpi.launcher, "-n", "2", sys.executable, "-m", "hpcdl", *arguments, "--learning-rate", "1e20"]
    assert subprocess.run(command, env=mpi.environment, capture_output=True, timeout=300).returncode != 0
    status, message = ended(mpi.hpcdl, run_dir)
    assert status == "failed" and "is not finite at step 1" in message
    assert mpi.hpcdl(["train", "--resume", "--run-dir", run_dir, "--from-step", "7"]).code == 2
    assert mpi.hpcdl([*RING, "--run-dir", tmp_path / "new", "--from-step", "0"]).code == 2
    advised = shlex.split(message[message.index("hpcdl train --resume") :])
    assert mpi.hpcdl(advised[1:]).code == 0
    assert ended(mpi.hpcdl, run_dir) == ("finished", "")
    again = mpi.hpcdl(["train", "--resume", "--run-dir", run_dir, "--steps", "8"])
    assert again.code == 0 and "resumed after step 6 of 8" in again.err, "it counted for one call"


@pytest.mark.parametrize(("optimizer", "rate", "diverges"), [("adam", "1", True), ("sgd", "0.01", False)])
def test_a_run_whose_finite_loss_exploded_says_so(
    run_hpcdl: CommandLine, optimizer: str, rate: str, diverges: bool, tmp_path: Path
) -> None:
    done = run_hpcdl([*TRAIN, "--optimizer", optimizer, "--lr", rate, "--steps", "25", "--run-dir", tmp_path / "run"])
    assert done.code == 0, done.err
    (warning,) = [text for text in record_of(tmp_path / "run")["warnings"] if "the training has diverged" in text] or [
        ""
    ]
    assert bool(warning) == diverges and (warning in done.err + done.out)

"""`hpcdl run` with hpcdl.State: a signal saves and exits with 75, and --resume continues from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdl.checkpoint.folders import newest_valid
from tests.conftest import CommandLine, Finished
from tests.scripts.scripts import HERE
from tests.training_runs import events, record_of


def said(finished: Finished, first_word: str) -> list[str]:
    return sorted(line for line in finished.out.splitlines() if line.startswith(first_word))


@pytest.mark.mpi
def test_a_script_saves_at_a_signal_and_continues(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    words = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", "--checkpoint-every", "auto"]
    script, content = tmp_path / "kept_script.py", (HERE / "kept_script.py").read_text()
    script.write_text(content)
    stopped = session_hpcdl([*words, script, "terminate"])
    assert stopped.code == 75, stopped.err
    assert said(stopped, "begins") == ["begins at epoch 0"] * 2
    assert any("a checkpoint every" in event["text"] for event in events(tmp_path / "run", "message"))
    assert "continue with --resume" in stopped.err
    assert stopped.err.count(f"checkpoints are in {tmp_path / 'run'}; folder='elsewhere' counts outside") == 1
    script.write_text(f"{content}# changed\n")
    ended = session_hpcdl([*words, "--resume", script])
    assert ended.code == 0, ended.err
    assert f"warning: {script} has changed since this run began" in ended.err and "has changed" not in stopped.err
    assert said(ended, "begins") == ["begins at epoch 3"] * 2 and said(ended, "ends") == ["ends at epoch 6"] * 2
    rates = [0.002 * (0.5 + 0.5 * min((epoch + 3 / 4) / 5, 1)) for epoch in range(6)]
    expected = [f"epoch {epoch} ends at a rate of {rate:.6f}" for epoch, rate in enumerate(rates) for _ in range(2)]
    assert said(stopped, "epoch") + said(ended, "epoch") == expected, "warmed up as if nothing had come between"
    record = record_of(tmp_path / "run")
    assert record["resumed_from_steps"] and record["steps"] == 12
    assert f"{script} has changed since this run began: part of it ran with other code" in record["warnings"]
    assert record["strategy"] == "ring" and record["bytes_sent_per_step"] == 4 * (6 * 8 + 8 + 8 + 1)
    assert record["global_batch"] == 16 and record["images_per_second"] > 0 and record["counted"] == "samples"


@pytest.mark.mpi
def test_a_script_that_loses_a_rank_continues_with_new_ones(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """New ranks replace a killed rank; a rank that was only cut off for a while is not replaced.

    Faults count the steps of the whole run: an epoch has four.
    """
    words = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", "--elastic", "--checkpoint-every", "0.1s"]
    words += ["--stall-timeout", "10s", "--inject", "partition:rank=1@step=1+1s,kill:rank=1@step=6,kill:rank=0@step=90"]
    ended = session_hpcdl([*words, HERE / "kept_script.py"])
    assert ended.code == 0, ended.err
    reported = [event["text"] for event in events(tmp_path / "run", "message")]
    assert "injected: partition:rank=1@step=1+1s" in reported
    assert ended.err.count("new ranks continue") == 1
    assert said(ended, "ends") == ["ends at epoch 6"] * 2
    assert len(said(ended, "begins")) == 4, "each of two ranks begins twice"
    record = record_of(tmp_path / "run")
    assert record["status"] == "finished" and record["resumed_from_steps"]
    assert "a fault was injected: kill of rank 1 at step 6" in record["warnings"]
    assert "a fault was not reached: kill of rank 0 at step 90; --inject kill:rank=0@step=90 has done nothing" in [
        *record["warnings"]
    ]
    assert not any("asked for" in text for text in record["warnings"])
    assert "warning: a fault was not reached" in ended.err


@pytest.mark.mpi
@pytest.mark.parametrize("ways", [("gaps",), pytest.param(("gaps", "thread", "off"), marks=pytest.mark.soak)], ids=len)
def test_a_script_has_work_for_the_background_and_the_same_numbers(
    session_hpcdl: CommandLine, tmp_path: Path, ways: tuple[str, str]
) -> None:
    """Background checkpoints and callbacks keep each epoch's order and all numbers; `off` runs them in the step.

    `make test-all` compares runs in test_background.py.
    """
    losses, where = {}, {}
    for way in ways:
        run_dir = tmp_path / way
        words = ["run", "--ranks", "2", "--run-dir", run_dir, "--checkpoint-every", "0.05s", "--background", way]
        ended = session_hpcdl([*words, HERE / "background_script.py"])
        assert ended.code == 0, ended.err
        losses[way], where[way] = said(ended, "losses"), said(ended, "in the main")
        record = record_of(run_dir)
        assert sum(record["background"].values()) > 0 and not record["warnings"]
        assert way == "gaps" or record["background"]["in_gaps_s"] == 0
        assert newest_valid(run_dir, []) is not None
        assert not [*(run_dir / "checkpoints").glob(".*")], "what was begun was finished"
    assert len({line for lines in losses.values() for line in lines}) == 1
    assert where == {way: [f"in the main thread {{{way == 'off'}}}"] * 2 for way in losses}

"""Several steps in one call of the graph: the same numbers, and every guarantee of a single step holds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.strategies.refusals import check_steps_per_call
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine
from tests.training_runs import SHORT, events, record_of, same_run, start, steps_done, wait_for

HERE = Path(__file__).parent
ABLE = [name for name, info in STRATEGIES.items() if info.features.several_steps]
TRACED = {"7": ["--trace", "full"]}
WAYS = {"ring": TRACED}
"""Compared with one step per call in `make test-all`: a given number of steps; other runs choose theirs."""


def run(strategy: str, data: Path | str, run_dir: Path, *more: object) -> list[object]:
    ranks = 1 if strategy == "single" else 2
    line = [*SHORT, "--strategy", strategy, "--ranks", ranks, "--data", data, "--run-dir", run_dir, *more]
    return [str(word) for word in line]


@pytest.mark.parametrize("name", STRATEGIES)
def test_several_steps_a_call_are_taken_or_refused_as_declared(name: str) -> None:
    info = STRATEGIES[name]
    check_steps_per_call(info, "auto")
    check_steps_per_call(info, 1)
    if info.features.several_steps:
        check_steps_per_call(info, 20)
        return
    with pytest.raises(UsageError, match=f"--steps-per-call 20: strategy '{name}' does not have it"):
        check_steps_per_call(info, 20)


def test_the_command_line_refuses_before_anything_starts(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = ["train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--strategy", "ps", "--ranks", "2"]
    finished = ask_hpcdl([*line, "--steps-per-call", "2", "--run-dir", tmp_path / "run"])
    assert finished.code == 2
    assert "--steps-per-call 2: strategy 'ps' does not have it" in finished.err
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("strategy", "ways"),
    [
        *(pytest.param(name, ways, id=name) for name, ways in WAYS.items()),
        *(pytest.param(name, {"auto": [], **TRACED}, id=f"{name}-all", marks=pytest.mark.soak) for name in ABLE),
    ],
)
def test_losses_and_weights_are_those_of_one_step_a_call(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str, ways: dict[str, list[str]]
) -> None:
    """Losses and weights equal those of one step per call; evaluations and epochs end alike, traces have all steps."""
    for most, more in {"1": [], **ways}.items():
        line = run(strategy, shards, tmp_path / most, "--epochs", 2, "--steps-per-call", most, *more)
        finished = session_hpcdl(line, timeout_s=400)
        assert finished.code == 0, finished.err
    for most in ways:
        same_run(tmp_path / most, tmp_path / "1")
    steps, left_out = (record_of(tmp_path / "1")[key] for key in ("steps", "warmup_steps"))
    if "7" in ways:
        finished = session_hpcdl(["trace", tmp_path / "7", "--json"])
        assert finished.code == 0, finished.err
        assert json.loads(finished.out)["steps"] == steps - left_out
    for most in ("1", *ways):
        (own, *_) = record_of(tmp_path / most)["rank_records"]
        assert len(record_of(tmp_path / most)["step_seconds"]) == steps
        assert min(own["parts"].values()) >= 0


@pytest.mark.long
def test_every_step_has_its_loss_bit_for_bit_in_every_kind_of_network(tmp_path: Path) -> None:
    """Every step has its loss bit for bit: with state, random numbers, slices of a batch, float16, changing rates."""
    out = tmp_path / "losses.json"
    subprocess.run([sys.executable, HERE / "several_steps.py", tmp_path, out], check=True, timeout=600)
    cases = json.loads(out.read_text())
    assert len(cases) >= 4
    for case, found in cases.items():
        one, *others = found.values()
        assert len(one["losses"]) == len(set(one["losses"])) == 12
        assert len({tuple(rate) for rate in (one["rates"], *(other["rates"] for other in others))}) == 1
        for most, other in zip([*found][1:], others, strict=True):
            assert other["losses"] == one["losses"], f"{case}, {most} steps a call"
            assert other["weights"] == one["weights"], f"{case}, {most} steps a call"
            assert other["told"] == one["told"] == [*range(12)], "the watch sees every step"
        assert max(other["longest_call"] for other in others) == 5


@pytest.mark.mpi
@pytest.mark.parametrize("fault", [pytest.param("nan", marks=pytest.mark.soak), "error"])
def test_a_fault_of_a_batch_strikes_its_step_and_no_other(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, fault: str
) -> None:
    """A fault in a batch strikes its step alone; `make test-all` has numbers that are not finite, below."""
    line = run("single", shards, tmp_path / "run", "--epochs", 2, "--inject", f"{fault}:rank=0@step=37")
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 1
    assert ("not finite at step 37 on rank 0; samples of the batch: " if fault == "nan" else "injected") in finished.err
    (reported,) = [event for event in events(tmp_path / "run", "message") if event["text"].startswith("injected: ")]
    assert reported["step"] == 37


@pytest.mark.mpi
def test_a_learning_rate_that_explodes_is_named_with_its_step(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """A diverging learning rate is reported from inside a call with the step and the samples of one step per call."""
    reported = []
    for most in ("1", "auto"):
        line = run("single", shards, tmp_path / most, "--epochs", 2, "--learning-rate", 30, "--schedule", "constant")
        finished = session_hpcdl([*line, "--steps-per-call", most], timeout_s=300)
        assert finished.code == 1
        (line,) = [line for line in finished.err.splitlines() if "not finite at step" in line]
        reported.append(line[line.index("not finite") :].replace(str(tmp_path / most), "RUN"))
        assert not (tmp_path / most / "model.keras").exists()
    assert reported[0] == reported[1]


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["single", "ring"])
def test_a_stopped_run_continues_with_another_number_of_steps_a_call(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert session_hpcdl(run(strategy, shards, whole, "--epochs", 4), timeout_s=400).code == 0
    process = start(session_hpcdl, run(strategy, shards, stopped, "--epochs", 4))
    wait_for(lambda: steps_done(stopped) > 20)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 75
    assert 20 < steps_done(stopped) < record_of(whole)["steps"]
    finished = session_hpcdl(["train", "--run-dir", stopped, "--resume", "--steps-per-call", "1"], timeout_s=400)
    assert finished.code == 0, finished.err
    same_run(stopped, whole)


@pytest.mark.mpi
@pytest.mark.soak
def test_a_strategy_that_is_asked_between_steps_takes_one(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """A strategy that needs a check between steps takes one step per call by default, as all runs of `ps` do."""
    line = [*run("ps", shards, tmp_path / "run", "--steps", 4), "--ranks", "3"]
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 0, finished.err
    assert record_of(tmp_path / "run")["steps"] == 4

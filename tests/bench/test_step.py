"""`hpcdl bench step`: every strategy as users run it on real ranks, and what is refused before any start."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from hpcdl.bench.step import StepResult, _summary
from hpcdl.config.load import Layer, load
from hpcdl.config.schema import StepBenchConfig
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine

STEP = ["bench", "step", "--model", "lenet", "--batch-size", "4", "--steps", "6", "--warmup-steps", "1"]
SAMPLE = {"grpc-ps"}
"""Strategies run in every test; `ring` is covered by a launcher's ranks below and by trials of tune-threads."""


def ranks_of(strategy: str) -> int:
    """Return two workers, plus a server if the strategy has servers."""
    return 1 if strategy == "single" else 2 + STRATEGIES[strategy].features.servers


@pytest.mark.mpi
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.soak) for name in sorted(STRATEGIES)],
)
def test_every_strategy_has_a_step_with_and_without_its_exchange(run_hpcdl: CommandLine, strategy: str) -> None:
    allowed = ["--allow-grpc"] if STRATEGIES[strategy].features.open_servers else []
    finished = run_hpcdl([*STEP, "--strategy", strategy, "--ranks", str(ranks_of(strategy)), *allowed, "--json"])
    assert finished.code == 0, finished.err
    found = finished.json()
    workers = 1 if strategy == "single" else 2
    assert (found["strategy"], found["workers"], found["nodes"], found["steps"]) == (strategy, workers, 1, 6)
    assert found["step_seconds"] > 0 and found["compute_seconds"] > 0
    assert found["efficiency"] == pytest.approx(found["compute_seconds"] / found["step_seconds"])
    assert len(found["samples"]) == 6 and 1.5 < found["loss"] < 3.5, "ten classes, initial weights: about ln 10"
    assert ("authenticate nobody" in finished.err) is bool(allowed)
    counted = strategy in {"single", "ring", "ps", "easgd", "async-easgd"}
    assert (found["bytes_sent_per_step"] is not None) or not counted
    assert not list(run_hpcdl.home.rglob("hpcdl-bench-*"))


@pytest.mark.mpi
def test_the_next_step_is_allowed_what_this_one_was(run_hpcdl: CommandLine) -> None:
    finished = run_hpcdl([*STEP, "--strategy", "nccl", "--ranks", "2", "--allow-grpc"])
    assert finished.code == 0, finished.err
    next_step = finished.err.splitlines()[-1]
    assert next_step.startswith("next: hpcdl train --model lenet --data synthetic:mnist --steps 20 --strategy nccl")
    assert next_step.endswith("--ranks 2 --batch-size 4 --allow-grpc")


@pytest.mark.mpi
def test_ranks_of_a_launcher(run_hpcdl: CommandLine) -> None:
    from hpcdl.cluster.launchers.mpiexec import find_mpiexec

    line = [find_mpiexec().path, "-n", "2", sys.executable, "-m", "hpcdl", *STEP, "--strategy", "ring", "--json"]

    def start(*more: str) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in (*line, *more)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, env=run_hpcdl.environment)

    finished = start()
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert (found["ranks"], found["workers"], found["steps"]) == (2, 2, 6), "one document: rank 0's"
    refused = start("--placement", "greedy")
    assert refused.returncode == 2 and refused.stderr.count("--placement greedy: strategy 'ring'") == 1
    mismatch = start("--ranks", "3")
    assert mismatch.returncode == 2 and mismatch.stderr.count("--ranks 3, but") == 1


@pytest.mark.parametrize(
    "words, reported",
    [
        (("--strategy", "grpc-ring", "--ranks", "2"), "--strategy grpc-ring: TensorFlow's gRPC servers authenticate"),
        (("--strategy", "grpc-ps", "--ranks", "1", "--allow-grpc"), "use --ranks 2 or more"),
        (("--strategy", "async-easgd", "--ranks", "3", "--moving-rate", "1.5"), "alpha must be at most 1"),
        (("--strategy", "ring", "--ranks", "2", "--elasticity", "1"), "has no elastic exchange"),
        (("--strategy", "sync-easgd", "--ranks", "3", "--groups", "2"), "must be a multiple of --groups"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_slips_are_reported_before_anything_starts(
    words: tuple[str, ...], reported: str, ask_hpcdl: CommandLine
) -> None:
    finished = ask_hpcdl([*STEP, *words])
    assert finished.code == 2 and reported in finished.err and len(finished.err.splitlines()) == 1, finished.err


def test_a_site_may_forbid_it(ask_hpcdl: CommandLine) -> None:
    (ask_hpcdl.home / "site.toml").write_text('[site]\nforbid-strategies = ["grpc-ring"]\n')
    finished = ask_hpcdl([*STEP, "--strategy", "grpc-ring", "--ranks", "2", "--allow-grpc"])
    assert finished.code == 2 and "this site forbids it" in finished.err, finished.err


def summary_of(strategy: str, seconds: Sequence[Sequence[float]]) -> StepResult:
    """Return the result of workers with batch 4 and these step times by rank; half of the time is without exchange."""
    values = {"model": "lenet", "batch-size": 4, "ranks": 2, "strategy": strategy}
    config = load(StepBenchConfig, [Layer(origin="test", values=values)]).config
    own = {
        "counted": "images",
        "first_loss": 2.3,
        "bytes_sent_per_step": None,
        "peak_memory_bytes": 1,
        "fast_kernels": [],
        "device": "NVIDIA H200",
        "warnings": [],
        "bucket_bytes": None,
    }
    ranks = [own | {"with_exchange": steps, "without_exchange": [step / 2 for step in steps]} for steps in seconds]
    return _summary(config, len(ranks), 1, ranks)


@pytest.mark.parametrize(
    "strategy, rate", [("ring", 2 * 4 * 2 / (1.0 + 4.0)), ("async-easgd", 2 * 4 / (1.0 + 4.0) + 4 / 0.5)]
)
def test_throughput_is_all_samples_over_all_time(strategy: str, rate: float) -> None:
    """Throughput is samples over time: a mean of the rates of 1 s and 4 s would claim 3.2 s for both steps, not 5 s."""
    assert summary_of(strategy, [[1.0, 4.0], [0.5, 0.5]]).images_per_second == pytest.approx(rate)


@pytest.mark.parametrize(
    "strategy, step_s, rate",
    [("ring", 2.0, 2 * 4 / 2.0), ("async-easgd", 1.5, 4 / 1.0 + 4 / 2.0)],
)
def test_who_waits_for_nobody_is_not_as_slow_as_the_slowest(strategy: str, step_s: float, rate: float) -> None:
    found = summary_of(strategy, [[1.0] * 3, [2.0] * 3])
    assert (found.step_seconds, found.images_per_second) == (step_s, rate)
    assert found.compute_seconds == step_s / 2 and found.efficiency == 0.5
    printed = json.loads(json.dumps(dataclasses.asdict(found)))  # as the command prints it
    assert printed["accelerators"] == {"NVIDIA H200": 2}


def test_a_difference_that_the_steps_do_not_show_is_not_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    from hpcdl.cli.study.bench import _print_step

    clear = summary_of("ring", [[0.1, 0.11, 0.12, 0.13, 0.14]] * 2)
    assert clear.distinguishable and clear.step_middle_half == pytest.approx([0.11, 0.13])
    _print_step(clear)
    shown = capsys.readouterr().out
    assert "step                   120 ms (middle half 110 ms to 130 ms)" in shown and "5 steps of each kind" in shown
    assert "not distinguishable" not in shown
    unclear = summary_of("single", [[0.1, 0.9, 0.1, 0.9]])
    _print_step(unclear)
    assert unclear.distinguishable is False
    shown = capsys.readouterr().out
    assert "250 ms (not distinguishable from none)" in shown
    assert "0.500 (not distinguishable from 1)" in shown

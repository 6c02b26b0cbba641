"""--bucket-size auto: chosen by trial steps that leave nothing behind, kept, and resumed; else refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.config.schema import BUCKET_BYTES, ExchangeConfig, ModelConfig, OptimizerConfig
from hpcdl.core.errors import UsageError
from hpcdl.step.bucket_size import times_file
from hpcdl.strategies.refusals import check_exchange
from hpcdl.strategies.table import STRATEGIES, find_strategy
from tests.conftest import CommandLine
from tests.training_runs import events, record_of

MIB = 1 << 20
TRAIN = ["train", "--model", "lenet", "--batch-size", "16", "--profile", "none", "--bucket-size", "auto"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_is_taken_or_refused_as_declared(name: str) -> None:
    info = STRATEGIES[name]
    if info.features.measured_buckets:
        check_exchange(info, ExchangeConfig(strategy=name, bucket_size="auto"), num_workers=2)
        return
    with pytest.raises(UsageError, match=f"--bucket-size auto: strategy '{name}' does not have it"):
        check_exchange(info, ExchangeConfig(strategy=name, bucket_size="auto"), num_workers=2)


def test_every_all_reduce_has_it() -> None:
    assert all(info.features.measured_buckets == (info.family == "all-reduce") for info in STRATEGIES.values())


def test_the_command_line_refuses_before_anything_starts(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = [*TRAIN, "--data", "synthetic:28x28x1:10", "--strategy", "ps", "--ranks", "2", "--run-dir", tmp_path / "run"]
    finished = ask_hpcdl(line)
    assert finished.code == 2 and not (tmp_path / "run").exists()
    assert "--bucket-size auto: strategy 'ps' does not have it" in finished.err


def test_scripts_learn_how_to_find_a_size() -> None:
    from hpcdl.scripts.exchange import ExchangeSettings

    with pytest.raises(UsageError, match=r"give a size: `hpcdl bench step .* --strategy tree --bucket-size auto`"):
        ExchangeSettings(strategy="tree", bucket_size="auto").checked()


@pytest.mark.parametrize("rule", ["momentum", "adam", "lars"])
def test_trials_leave_weights_statistics_and_random_states_as_they_were(rule: str) -> None:
    import keras

    from hpcdl.comm.threads import alone
    from hpcdl.step.bucket_size import TrialStep, _timed
    from hpcdl.step.objective import Classification
    from hpcdl.step.step import build_step
    from hpcdl.strategies.allreduce.worker import AllReduceWorker
    from hpcdl.strategies.base.strategy import Context

    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)]
    )
    model.trainable_variables[1].assign(-numpy.zeros(8))  # which becomes +0 if anything is added to it
    before = [variable.numpy().copy() for variable in model.variables]
    exchange, optimizer = ExchangeConfig(bucket_size="auto"), OptimizerConfig(optimizer=rule, weight_decay=0.1)
    worker = AllReduceWorker(
        Context(
            info=find_strategy("ring"), communicator=alone(), num_workers=1, num_servers=0,
            exchange=exchange, optimizer=optimizer,
        )
    )  # fmt: skip
    batch = numpy.ones((5, 4), numpy.float32), numpy.array([0, 1, 2, 0, 1])
    seen: list[int] = []

    def build(optimizer: Any) -> Any:
        step = build_step(model, optimizer, worker, Classification())

        def taken(*batch: Any) -> Any:
            seen.append(worker.bucket_bytes)
            return step(*batch)

        return taken

    trial = TrialStep(model, (ModelConfig(model="own"), exchange, optimizer), build, lambda: batch, [5])
    times = _timed(worker, alone(), trial, [64, 1024])
    assert [*times] == ["64", "1024"] and min(times.values()) > 0
    assert seen[:4] == [64, 1024, 64, 1024], "in turn"
    assert worker.bucket_bytes == BUCKET_BYTES
    for variable, value in zip(model.variables, before, strict=True):
        assert variable.numpy().tobytes() == value.tobytes(), variable.path


@pytest.mark.mpi
def test_a_run_says_what_it_chose_and_from_what(run_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    line = [*TRAIN, "--strategy", "ring", "--ranks", "2", "--data", shards, "--steps", "3"]
    finished = run_hpcdl([*line, "--run-dir", tmp_path / "first"], timeout_s=300)
    assert finished.code == 0, finished.err
    found = chosen_by(tmp_path / "first", "as measured")
    assert [*found] == [str(BUCKET_BYTES), str(MIB)], "LeNet's 1.7 MB in one bucket, or cut up"
    (kept,) = run_hpcdl.home.glob("cache/hpcdl/buckets/*.json")
    document = json.loads(kept.read_text())
    assert document["seconds"] == found and document["facts"]["ranks"] == "2"
    assert kept.name == times_file(document["facts"]).name


@pytest.mark.mpi
@pytest.mark.soak
def test_what_was_measured_is_kept_and_a_run_continues_with_its_size(
    run_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    line = [*TRAIN, "--strategy", "ring", "--data", shards]
    runs = {name: tmp_path / name for name in ("first", "second", "deterministic")}
    for run_dir, more in zip(runs.values(), ([], [], ["--deterministic"]), strict=True):
        words = [*line, "--ranks", "2", "--time-limit", "1ms", *more, "--run-dir", run_dir, "--steps", "9"]
        assert run_hpcdl(words, timeout_s=300).code == 75
    (kept,) = run_hpcdl.home.glob("cache/hpcdl/buckets/*.json")
    document = json.loads(kept.read_text())
    kept.write_text(json.dumps({**document, "seconds": {str(BUCKET_BYTES): 1.0, str(MIB): 0.5}}))
    again = ["train", "--resume", "--time-limit", "1h", "--run-dir"]
    finished = run_hpcdl([*again, runs["first"]], timeout_s=300)
    assert finished.code == 0, finished.err
    assert record_of(runs["first"])["bucket_seconds"] == document["seconds"], "its own, not what is kept now"
    assert run_hpcdl([*again, runs["deterministic"]], timeout_s=300).code == 0
    assert chosen_by(runs["deterministic"], "not measured, because of --deterministic") == {}
    third = tmp_path / "third"
    assert run_hpcdl([*line, "--ranks", "2", "--steps", "2", "--run-dir", third], timeout_s=300).code == 0
    chosen_by(third, "as an earlier run has measured")
    assert record_of(third)["bucket_bytes"] == MIB
    finished = run_hpcdl([*again, runs["second"], "--ranks", "1"], timeout_s=300)
    assert finished.code == 0, finished.err
    assert record_of(runs["second"])["bucket_seconds"] == {}, "on another number of ranks it is chosen again"


def chosen_by(run_dir: Path, why: str) -> dict[str, float]:
    """Return the times by which a run has chosen, after a check of its messages about them."""
    record = record_of(run_dir)
    reported = [
        event["text"] for event in events(run_dir, "message") if event["text"].startswith("--bucket-size auto: ")
    ]
    assert reported and all(f"({why}" in text for text in reported), reported
    seconds: dict[str, float] = record["bucket_seconds"]
    assert str(record["bucket_bytes"]) in (seconds or {str(BUCKET_BYTES): None})
    return seconds

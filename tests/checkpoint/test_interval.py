"""--checkpoint-every auto: an interval from the cost of checkpoints and the failure rate of nodes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpcdl.checkpoint.interval import FIRST_S, LEAST_S, CheckpointInterval
from hpcdl.config.load import Layer, as_toml_values, flag_layer, load, settings_by_key
from hpcdl.config.schema import ScriptConfig, TrainConfig
from hpcdl.config.settings import AUTO
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine
from tests.training_runs import SHORT, events, record_of


def auto(node_mtbf_s: float = 1e6, num_nodes: int = 4) -> CheckpointInterval:
    return CheckpointInterval(AUTO, node_mtbf_s=node_mtbf_s, num_nodes=num_nodes)


def lost_share(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the lost share of the time, to first order: a checkpoint per interval, half an interval per failure."""
    return cost_s / interval_s + interval_s / 2 / mtbf_s


@pytest.mark.parametrize(("cost_s", "nodes"), [(0.02, 1), (0.5, 16), (30.0, 1000)])
def test_no_other_interval_loses_less(cost_s: float, nodes: int) -> None:
    interval = CheckpointInterval(AUTO, node_mtbf_s=1.3e7, num_nodes=nodes)
    assert interval.seconds == FIRST_S
    interval.saved(cost_s)
    found, mtbf_s = interval.seconds, 1.3e7 / nodes
    assert found == pytest.approx(math.sqrt(2 * cost_s * mtbf_s))
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert lost_share(found, cost_s, mtbf_s) < lost_share(found * factor, cost_s, mtbf_s)


def test_the_first_checkpoint_is_not_what_the_others_cost() -> None:
    interval = auto()
    for cost_s in (5.0, 0.1, 0.1, 0.1):
        interval.saved(cost_s)
    assert interval.choice == {
        "seconds": interval.seconds, "stall_seconds": 0.1, "node_mtbf_seconds": 1e6, "nodes": 4
    }  # fmt: skip


def test_it_is_reported_once_and_again_when_it_changes_much() -> None:
    interval = auto()
    reported = interval.saved(0.1)
    assert "100 ms" in reported and "one of 4 nodes" in reported and "sqrt" in reported and "never less" not in reported
    assert interval.saved(0.11) == ""
    assert [bool(interval.saved(10.0)) for _ in range(3)].count(True) == 1


def test_it_is_never_shorter_than_the_file_system_can_bear() -> None:
    interval = auto(node_mtbf_s=1.0)
    assert "never less" in interval.saved(0.1) and interval.seconds == LEAST_S


def test_a_time_that_was_given_stands() -> None:
    interval = CheckpointInterval(12.5, node_mtbf_s=1e6, num_nodes=4)
    assert interval.saved(3.0) == "" and interval.seconds == 12.5 and interval.choice == {}


@pytest.mark.parametrize("kind", [TrainConfig, ScriptConfig])
def test_auto_is_a_value_and_survives_run_toml(kind: type) -> None:
    needed = {"model": "lenet", "data": "synthetic:hep"} if kind is TrainConfig else {}
    site = Layer(origin="site (site.toml)", values={"mtbf": "1h"})
    found = load(kind, [site, flag_layer({**needed, "checkpoint_every": "auto"})])
    again = load(kind, [Layer(origin="run.toml", values=as_toml_values(found.config))])
    assert again.config.checkpoint.checkpoint_every == AUTO and again.config.checkpoint.mtbf == 3600.0
    item = settings_by_key(kind)["checkpoint-every"]
    assert item.show(AUTO) == "auto" and item.show(600.0) == "10m00s"
    for wrong in ("soon", "0", "-3", "none"):
        with pytest.raises(ValueError):
            item.parse(wrong)


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_journal_and_record_tell_what_was_chosen(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """Journal and record contain the chosen interval; `make test-all` has a script's (keras/test_kept.py)."""
    features = STRATEGIES[strategy].features
    run_dir = tmp_path / "run"
    line = [*SHORT, "--model", "emulated:lenet:0.1s", "--strategy", strategy, "--ranks", "2", "--data", shards]
    line += ["--steps", "80", "--run-dir", run_dir, "--checkpoint-every", "auto", "--mtbf", "1h"]
    line += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"] if features.optimizers else []
    line += [] if features.mpi else ["--allow-grpc"]
    if strategy == "single":
        line[line.index("--ranks") + 1] = "1"
    if not features.keras_optimizer or not features.deterministic:
        line.remove("--deterministic")
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 0, finished.err
    choice = record_of(run_dir)["checkpoint_interval"]
    best_s = math.sqrt(2 * choice["stall_seconds"] * 3600)
    assert choice["seconds"] == pytest.approx(max(LEAST_S, best_s)) and choice["nodes"] == 1
    assert any("a checkpoint every" in event["text"] for event in events(run_dir, "message"))

"""Settings that the family cannot use are refused before anything starts, with the reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hpcdl.config.load import Layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.config.study import load_study
from hpcdl.core.errors import UsageError
from hpcdl.node.machines import read_topology
from hpcdl.node.topology import FAST_KINDS, NumaNode, Topology
from hpcdl.run import groups as chips
from hpcdl.run.plan import prepare
from hpcdl.strategies.table import STRATEGIES
from hpcdl.study.plan import is_try, make_plan
from tests.conftest import ROOT, CommandLine

FAMILY = [name for name, info in STRATEGIES.items() if info.features.optimizers]


def refusal(**settings: Any) -> str:
    values = {"model": "lenet", "data": "synthetic:28x28x1:10", "ranks": 5, "batch-size": 8}
    values |= {name.replace("_", "-"): value for name, value in settings.items()}
    with pytest.raises(UsageError) as caught:
        prepare(load(TrainConfig, [Layer(origin="flag", values=values)]))
    return str(caught.value)


def test_the_family_is_complete() -> None:
    assert set(FAMILY) == {
        "easgd", "async-sgd", "async-msgd", "hogwild-sgd", "async-easgd", "async-measgd", "hogwild-easgd", "sync-easgd"
    }  # fmt: skip
    for name in FAMILY:
        assert "1708.02983" in STRATEGIES[name].source


@pytest.mark.parametrize(("settings", "words"), [
    ({"strategy": "sync-easgd", "moving_rate": 0.34}, ["0.34", "2 / (workers + 1) = 0.333333", "unstable"]),
    ({"strategy": "sync-easgd", "elasticity": 40.0, "learning_rate": 0.01}, ["40", "= 0.4", "0.333333"]),
    ({"strategy": "easgd", "moving_rate": 1.01}, ["1.01", "at most 1"]),
    ({"strategy": "hogwild-easgd", "moving_rate": 1.01}, ["1.01", "at most 1"]),
    ({"strategy": "async-easgd", "moving_rate": 0.1, "elasticity": 1.0}, ["exclude each other"]),
    ({"strategy": "sync-easgd", "period": 0}, ["period", "at least 1"]),
    ({"strategy": "sync-easgd", "ranks": 1}, ["--ranks 1", "--ranks 2"]),
    ({"strategy": "hogwild-sgd", "ranks": 1}, ["--ranks 1", "--ranks 2"]),
    ({"strategy": "async-sgd", "ranks": 1}, ["at least one worker"]),
    ({"strategy": "async-easgd", "servers": 5}, ["--servers 5", "--ranks 6"]),
    ({"strategy": "easgd", "optimizer": "adam"}, ["--optimizer adam", "--optimizer sgd"]),
    ({"strategy": "async-measgd", "optimizer": "sgd"}, ["--optimizer momentum"]),
    ({"strategy": "sync-easgd", "momentum": 0.9}, ["without momentum", "async-measgd"]),
    ({"strategy": "async-sgd", "momentum": 0.9}, ["without momentum", "async-msgd"]),
    ({"strategy": "easgd", "weight_decay": 1e-4}, ["--weight-decay", "without weight decay"]),
    ({"strategy": "easgd", "precision": "mixed_float16"}, ["mixed_bfloat16"]),
    ({"strategy": "sync-easgd", "variant": 1, "compress": "fp16"}, ["--compress fp16: --variant 1", "--variant 3"]),
    ({"strategy": "easgd", "compress": "bf16"}, ["--compress bf16: strategy 'easgd' does not have it"]),
    ({"strategy": "easgd", "variant": 2}, ["only sync-easgd has variants"]),
    ({"strategy": "async-sgd", "period": 2}, ["--period", "no elastic exchange"]),
    ({"strategy": "ring", "servers": 1}, ["--servers", "'ring' has no servers", "such as ps"]),
    ({"strategy": "ring", "moving_rate": 0.1}, ["--moving-rate", "no elastic exchange"]),
    ({"strategy": "hogwild-easgd", "unpacked": True}, ["--unpacked", "in place"]),
    ({"strategy": "ring", "groups": 2}, ["--groups 2 --ranks 5", "multiple"]),
    ({"strategy": "sync-easgd", "groups": 5}, ["one chip", "--ranks 10"]),
    ({"strategy": "async-easgd", "groups": 2}, ["does not sum gradients"]),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    message = ""
    try:
        message = refusal(**settings)
    except UsageError as error:
        message = str(error)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("name", FAMILY)
def test_what_makes_sense_is_not(name: str) -> None:
    rule = STRATEGIES[name].features.optimizers[0]
    values = {"model": "lenet", "data": "synthetic:28x28x1:10", "ranks": 5, "strategy": name, "optimizer": rule}
    run_plan = prepare(load(TrainConfig, [Layer(origin="flag", values=values)]))
    assert run_plan.num_workers == 5 - run_plan.num_servers


def node_with_fast_memory(gigabytes: float) -> Topology:
    topology = read_topology()
    fast = NumaNode(**{
        **{field.name: getattr(topology.numa_nodes[0], field.name) for field in dataclasses.fields(NumaNode)},
        "index": 99, "kind": sorted(FAST_KINDS)[0], "memory_bytes": int(gigabytes * 1e9),
    })  # fmt: skip
    return dataclasses.replace(
        topology, numa_nodes=(*topology.numa_nodes, fast), allowed_memory_nodes=(*topology.allowed_memory_nodes, 99)
    )


def test_the_groups_copies_have_to_fit_in_the_fast_memory() -> None:
    """SC17's own case: AlexNet 249 MB + CIFAR-10 687 MB, 16 groups, need 14.98 GB of 16 GB."""
    node = node_with_fast_memory(16)
    chips.check_memory(16, 249_000_000, 687_000_000, node)
    with pytest.raises(UsageError) as caught:
        chips.check_memory(18, 249_000_000, 687_000_000, node)
    assert "18 groups" in str(caught.value) and "at most 17 groups fit" in str(caught.value)
    assert chips.weights_bytes("alexnet") == 4 * 62_378_344
    assert chips.weights_bytes("my_model.py:build") == 0


def test_the_command_line_lists_all_nine(ask_hpcdl: CommandLine) -> None:
    listed = {entry["name"]: entry for entry in ask_hpcdl(["strategies", "--json"]).json()["strategies"]}
    assert listed.keys() >= {*FAMILY, "sync-sgd"}
    assert listed["sync-sgd"]["features"] == listed["auto"]["features"]
    assert "sync-sgd" in ask_hpcdl(["strategies"]).out


def test_the_command_line_says_why(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished = ask_hpcdl([
        "train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--strategy", "sync-easgd", "--ranks", "3",
        "--moving-rate", "0.6", "--run-dir", run_dir,
    ])  # fmt: skip
    assert finished.code == 2 and "2 / (workers + 1) = 0.5" in finished.err
    assert not run_dir.exists()


@pytest.mark.parametrize(("small", "workers", "runs"), [(False, 4, 27), (True, 2, 18)])
def test_the_comparison_study_has_all_nine_methods(small: bool, workers: int, runs: int) -> None:
    study = load_study(ROOT / "share" / "hpcdl" / "studies" / "sc17-methods.toml", {}, small=small)
    plan = make_plan(study)
    assert {point.strategy for point in plan.points} == {*FAMILY, "sync-sgd"}
    measured = [run for run in plan.runs if not is_try(run.name)]
    assert all(point.workers == workers for point in plan.points) and len(measured) == runs and not plan.left_out
    assert len(plan.runs) > runs, "rates are tried first"
    assert study.train["target-accuracy"]
    for point in plan.points:
        settings = {**study.train, "model": "lenet", "data": "synthetic:28x28x1:10", "strategy": point.strategy}
        prepare(load(TrainConfig, [Layer(origin="file (study)", values={**settings, "ranks": point.ranks})]))

"""Every strategy that claims to equal `single` is held to it, on real MPI ranks."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.strategies.table import STRATEGIES

pytestmark = pytest.mark.mpi

LIMITS = {"sgd": 1e-5, "momentum": 1e-5, "nesterov": 1e-5, "adam": 1e-4, "lars": 1e-4}
HALF_LIMIT = 2e-2
RATES = {"sgd": 0.01, "momentum": 0.01, "nesterov": 0.01, "adam": 0.0005, "lars": 0.1}
MAX_RANKS = 4
LARGE = 256
"""Samples a worker with half precision on LeNet: a rounding error now and then switches one rectifier for one sample,
which changes a bias by that sample's whole share (8 % in a batch of 8, on 500 biases whose gradients nearly cancel)."""
SYNCHRONOUS = [name for name, info in STRATEGIES.items() if info.features.equals_single and info.features.mpi]


def case(strategy: str, num_workers: int, **changes: Any) -> dict[str, Any]:
    optimizer = changes.pop("optimizer", "sgd")
    defaults = {"network": "lenet", "batch": 4, "accumulate": 1, "exchange": {}}
    servers = 1 if STRATEGIES[strategy].features.servers else 0
    fixed = {"strategy": strategy, "num_workers": num_workers, "servers": servers}
    return {**defaults, **fixed, "optimizer": optimizer, "learning_rate": RATES[optimizer], **changes}


def fits(found: dict[str, Any]) -> bool:
    return found["num_workers"] + found["servers"] <= MAX_RANKS


QUICK = [
    *(case(name, 2 + number % 3) for number, name in enumerate(SYNCHRONOUS)),
    *(case("ring", 3, optimizer=optimizer, network="residual") for optimizer in LIMITS if optimizer != "sgd"),
    *(case("ring", 2, network="residual", exchange={"compress": compress}) for compress in ("fp16", "bf16")),
    *(case("ring", 2, batch=LARGE, exchange={"compress": compress}) for compress in ("fp16", "bf16")),
    case("ring", 2, accumulate=2),
    case("ring", 4, exchange={"bucket_size": 1}),
]
LONG = [
    case(name, num_workers, optimizer=optimizer, network=network)
    for name, num_workers, optimizer, network in itertools.product(
        SYNCHRONOUS, (2, 3, 4), LIMITS, ("lenet", "residual")
    )
]
LONG += [
    case(name, num_workers, network=network, batch=batch, exchange={"compress": compress})
    for name, num_workers, (network, batch), compress in itertools.product(
        [name for name in SYNCHRONOUS if STRATEGIES[name].features.compression],
        (2, 3, 4),
        (("lenet", LARGE), ("residual", 4)),
        ("fp16", "bf16"),
    )
]


def run_cases(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    mpiexec = find_mpiexec()
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("equality_ranks.py")
    command = [str(mpiexec.path), "-n", str(MAX_RANKS), sys.executable, str(script)]
    subprocess.run(
        [*command, str(folder / "cases.json"), str(folder / "out.json")],
        check=True,
        env={**os.environ, **environment_for(mpiexec.flavour), "XDG_CACHE_HOME": str(folder)},
        timeout=3600,
    )
    results: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())
    return results


def check(found: dict[str, Any], result: dict[str, Any]) -> None:
    half = found["exchange"].get("compress", "none") != "none"
    limit = HALF_LIMIT if half else LIMITS[found["optimizer"]]
    assert result["bitwise"], f"{found}: ranks differ"
    assert result["error"] <= limit, f"{found}: {result['error']} > {limit}"


def test_every_strategy_equals_single(tmp_path: Path) -> None:
    cases = [found for found in QUICK if fits(found)]
    assert {found["strategy"] for found in cases} >= set(SYNCHRONOUS) - {"single"}
    for found, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        check(found, result)


@pytest.mark.soak
def test_every_strategy_equals_single_with_every_optimizer(tmp_path: Path) -> None:
    cases = [found for found in LONG if fits(found)]
    for found, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        check(found, result)

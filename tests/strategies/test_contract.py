"""Every strategy that claims to equal `single` does so, on real MPI ranks."""

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
GLOBAL_BATCH = 12
"""The same for any number of workers, so that `single` is trained once and compared with all strategies."""
LARGE = 256
"""Samples per worker for half precision on LeNet. A rounding error may switch one rectifier for one sample, which
changes a bias by that sample's whole share (8 % in a batch of 8, on 500 biases whose gradients nearly cancel)."""
SYNCHRONOUS = [name for name, info in STRATEGIES.items() if info.features.equals_single and info.features.mpi]


def case(strategy: str, num_workers: int, **changes: Any) -> dict[str, Any]:
    optimizer = changes.pop("optimizer", "sgd")
    defaults = {"network": "lenet", "batch": GLOBAL_BATCH // num_workers, "more": 0, "accumulate": 1, "exchange": {}}
    servers = 1 if STRATEGIES[strategy].features.servers else 0
    fixed = {"strategy": strategy, "num_workers": num_workers, "servers": servers}
    return {**defaults, **fixed, "optimizer": optimizer, "learning_rate": RATES[optimizer], **changes}


QUICK = [
    *(
        case(name, 2 + number % 3, optimizer=optimizer)
        for number, (name, optimizer) in enumerate(zip(SYNCHRONOUS, itertools.cycle(LIMITS)))
    ),
    case("ring", 2, network="residual", exchange={"compress": "fp16"}),
    *(case(name, 2, network="normalised", fast=True) for name in ("ring", "ps", "sync-easgd") if name in SYNCHRONOUS),
    case("ring", 3, network="normalised", optimizer="adam", fast=True),
    case("ring", 3, network="normalised", optimizer="adam"),
    case("ring", 3, accumulate=2, more=1),
    case("ps", 3, more=1),
    case("ring", 4, exchange={"bucket_size": 1}),
    case("ps", 2, servers=2, exchange={"placement": "greedy", "bucket_size": 1}),
    case("ps", 2, servers=2, exchange={"placement": "split"}, accumulate=2),
]
LONG = [
    case(name, num_workers, optimizer=optimizer, network=network)
    for name, num_workers, optimizer, network in itertools.product(
        SYNCHRONOUS, (2, 3, 4), LIMITS, ("lenet", "residual")
    )
]
LONG += [case(name, 2, network="normalised", fast=fast) for name in SYNCHRONOUS for fast in (False, True)]
LONG += [case(name, num_workers, more=1) for name, num_workers in itertools.product(SYNCHRONOUS, (2, 3, 4))]
LONG += [
    case(name, num_workers, network=network, batch=batch, exchange={"compress": compress})
    for name, num_workers, (network, batch), compress in itertools.product(
        [name for name in SYNCHRONOUS if STRATEGIES[name].features.compression],
        (2, 3, 4),
        (("lenet", LARGE), ("residual", 4)),
        ("fp16", "bf16"),
    )
]
LONG += [
    case("ring", 2, accumulate=2),
    case("ps", 2, servers=2, exchange={"placement": "round-robin"}),
    case("ps", 3, exchange={"placement": "greedy"}, network="residual"),
    case("ps", 3, exchange={"placement": "split"}, optimizer="adam"),
]


QUICK, LONG = (
    [found for found in cases if found["num_workers"] + found["servers"] <= MAX_RANKS] for cases in (QUICK, LONG)
)


SOAKED = {"tree", "recursive-doubling", "halving-doubling", "mpi"}
"""In the long version only: every `make test-all` compares their sums with numpy's in collectives/ and mpi/."""
EVERY_TIME = [found for found in QUICK if found["strategy"] not in SOAKED and "bucket_size" not in found["exchange"]]
LONG += [found for found in QUICK if found not in EVERY_TIME]


def name_of(found: dict[str, Any]) -> str:
    settings = [f"{key}-{value}" for key, value in found["exchange"].items()]
    settings += [f"accumulate-{found['accumulate']}"] if found["accumulate"] > 1 else []
    settings += ["fast-kernels"] if found.get("fast") else []
    settings += [f"uneven-{found['more']}"] if found["more"] else []
    return "-".join([found["strategy"], str(found["num_workers"]), found["optimizer"], found["network"], *settings])


class Equality:
    """The results of cases, all of them inside one mpiexec: TensorFlow starts once per rank."""

    def __init__(self, cases: list[dict[str, Any]], folder: Path) -> None:
        mpiexec = find_mpiexec()
        (folder / "cases.json").write_text(json.dumps(cases))
        script = Path(__file__).with_name("equality_ranks.py")
        command = [str(mpiexec.path), "-n", str(MAX_RANKS), sys.executable, str(script), str(folder / "cases.json")]
        environment = {**os.environ, **environment_for(mpiexec.flavour), "XDG_CACHE_HOME": str(folder)}
        finished = subprocess.run(
            [*command, str(folder / "out.jsonl")], env=environment, capture_output=True, text=True, timeout=3600
        )
        lines = (folder / "out.jsonl").read_text().splitlines() if (folder / "out.jsonl").exists() else []
        self.results: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.cases, self.said = cases, finished.stderr[-4000:]

    def check(self, found: dict[str, Any]) -> None:
        """Assert that the ranks agree bit for bit and are within the case's limit of `single`."""
        place = self.cases.index(found)
        assert place < len(self.results), f"the ranks ended after {len(self.results)} cases: {self.said}"
        half = found["exchange"].get("compress", "none") != "none"
        assert self.results[place]["bitwise"], "ranks differ"
        assert self.results[place]["error"] <= (HALF_LIMIT if half else LIMITS[found["optimizer"]])


@pytest.fixture(scope="module")
def equality(tmp_path_factory: pytest.TempPathFactory) -> Equality:
    return Equality(EVERY_TIME, tmp_path_factory.mktemp("equality"))


@pytest.fixture(scope="module")
def long_equality(tmp_path_factory: pytest.TempPathFactory) -> Equality:
    return Equality(LONG, tmp_path_factory.mktemp("equality"))


def test_every_strategy_and_optimizer_has_a_case() -> None:
    assert {found["strategy"] for found in QUICK} >= set(SYNCHRONOUS) - {"single"}
    assert {found["optimizer"] for found in QUICK} == set(LIMITS)


@pytest.mark.parametrize("found", EVERY_TIME, ids=name_of)
def test_a_strategy_equals_single(equality: Equality, found: dict[str, Any]) -> None:
    equality.check(found)


@pytest.mark.soak
@pytest.mark.parametrize("found", LONG, ids=name_of)
def test_a_strategy_equals_single_with_every_optimizer(long_equality: Equality, found: dict[str, Any]) -> None:
    long_equality.check(found)

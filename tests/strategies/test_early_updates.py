"""Updates while buckets are being sent leave the same bits as updates after all buckets: on MPI ranks, per strategy."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.core.errors import NotFiniteError, RankError, originals
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import ROOT, selected

ALL_REDUCES = [name for name in STRATEGIES if name in COLLECTIVES]
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "lars")


def case(strategy: str, optimizer: str = "momentum", **changes: Any) -> dict[str, Any]:
    exchange = {"bucket_size": 2000, **changes.pop("exchange", {})}
    fixed = {"strategy": strategy, "optimizer": optimizer, "accumulate": 1, "skips": False, "keras": {}}
    return {**fixed, "held": False, "spoilt": False, "exchange": exchange, **changes}


SAME = {
    **{f"{name} {rule}": case(name, rule) for name, rule in zip(ALL_REDUCES, itertools.cycle(OPTIMIZERS))},
    "fp16": case("ring", "adam", exchange={"compress": "fp16"}),
    "bf16 accumulated": case("ring", "lars", exchange={"compress": "bf16"}, accumulate=2),
    "accumulated": case("ring", accumulate=3),
    "global norm": case("ring", keras={"global_clipnorm": 0.01}),
    "each norm": case("ring", keras={"clipnorm": 0.01, "nesterov": True}),
    "averaged weights": case("ring", keras={"use_ema": True, "ema_overwrite_frequency": 2, "weight_decay": 0.01}),
    "skips": case("ring", skips=True),
}
LONG = {f"{name} {rule}": case(name, rule) for name in ALL_REDUCES for rule in OPTIMIZERS}
LONG = {name: found for name, found in LONG.items() if name not in SAME}
HELD = {
    "moves": (case("ring", held=True), True),
    "moves in half precision": (case("ring", held=True, exchange={"compress": "bf16", "bucket_size": 2000}), True),
    "waits for the global norm": (case("ring", held=True, keras={"global_clipnorm": 0.01}), False),
    "waits where steps are skipped": (case("ring", held=True, skips=True), False),
}
SPOILT = {"spoilt": case("ring", spoilt=True)}
CASES = SAME | LONG | SPOILT | {name: found for name, (found, _) in HELD.items()}
SOAKED = {
    *LONG, "waits for the global norm", "waits where steps are skipped", "auto momentum", "fp16", "accumulated",
    "tree momentum", "recursive-doubling nesterov", "mpi sgd", "each norm", "averaged weights",
    "moves in half precision",
}  # fmt: skip
"""In the long version only: waits take a minute, `auto` uses another strategy, a case has both halves and slices."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each of three ranks found, by selected case."""
    names = [name for name in selected(request, "name") if name in CASES]
    folder = tmp_path_factory.mktemp("early")
    mpiexec = find_mpiexec()
    (folder / "cases.json").write_text(json.dumps([CASES[name] for name in names]))
    script = Path(__file__).with_name("early_ranks.py")
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", "3", sys.executable, str(script)]
    subprocess.run(
        [*line, str(folder / "cases.json"), str(folder / "out.json")],
        check=True,
        env={**os.environ, **environment_for(mpiexec.flavour), "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)},
        timeout=3600,
    )
    return dict(zip(names, json.loads((folder / "out.json").read_text()), strict=True))


def test_every_all_reduce_and_optimizer_has_a_case() -> None:
    cases = [found for found in SAME.values() if not found["keras"]]
    assert {found["strategy"] for found in cases} == set(ALL_REDUCES)
    assert {found["optimizer"] for found in cases} == set(OPTIMIZERS)


def of_each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize with all these cases; those of SOAKED run in the long version only."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.soak) if name in SOAKED else name for name in names]
    )


@pytest.mark.mpi
@of_each(SAME)
def test_the_same_bits(results: dict[str, Any], name: str) -> None:
    assert results[name] == [{"different": 0, "finite": True}] * 3


@pytest.mark.mpi
@pytest.mark.parametrize("name", SPOILT)
def test_a_sum_that_its_way_has_spoilt_ends_the_step(results: dict[str, Any], name: str) -> None:
    assert results[name] == [{"ends": True}] * 3


@pytest.mark.mpi
@of_each(LONG)
def test_the_same_bits_with_every_optimizer(results: dict[str, Any], name: str) -> None:
    assert results[name] == [{"different": 0, "finite": True}] * 3


@pytest.mark.mpi
@of_each(HELD)
def test_weights_move_before_the_last_bucket_comes(results: dict[str, Any], name: str) -> None:
    """Weights change before the last bucket arrives unless an update needs all gradients; it is held up to a minute."""
    assert results[name] == [{"moved": HELD[name][1]}] * 3


def bounds(*gradients: Any) -> Any:
    tf = pytest.importorskip("tensorflow")
    from hpcdl.strategies.base.graph import bounds_of

    return tf.function(lambda: bounds_of([tf.constant(one, tf.float32) for one in gradients]))().numpy()


def test_a_bound_is_no_smaller_than_any_element() -> None:
    assert (bounds([1.0, -1.8e19], [[2.0]]) >= [1.8e19, 2.0]).all()
    assert numpy.isfinite(bounds([1.8e19] * 100)).all(), "squares overflow, but these are numbers"
    assert bounds([1e30, -3e38], [2.0]).tolist() == pytest.approx([3e38, 2.0], rel=1e-6)
    assert bounds([1.0, numpy.nan], [2.0], [-numpy.inf]).tolist() == [numpy.inf, 2.0, numpy.inf]
    largest = numpy.finfo(numpy.float32).max
    brink = numpy.float32(numpy.sqrt(numpy.float64(largest) * 2) * 0.999)
    assert (bounds([brink]) >= brink).all()


@pytest.mark.parametrize(("mine", "text"), [
    (numpy.inf, "the gradient of b is not finite at step 7 on rank 1"),
    (1.6e38, "the sum of all ranks' gradients is not finite at step 7"),
])  # fmt: skip
def test_ranks_agree_on_what_their_sums_will_be(mine: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on whether their sum is finite: two ranks with 1.6e38 each may overflow, one alone does not."""
    tf = pytest.importorskip("tensorflow")
    from hpcdl.collectives import recursive_doubling
    from hpcdl.strategies.base import graph

    monkeypatch.setattr(graph, "FIRST_WORD_S", 0.0)

    def rank(communicator: ThreadCommunicator) -> str:
        guard = graph.FiniteGuard(communicator.rank, communicator)
        guard.step = 7
        other = 1.6e38 if numpy.isfinite(mine) else 0.0

        def agree(value: float) -> None:
            with originals():
                agreed = guard.agreed(
                    tf.constant([1.0, value], tf.float32), ["a", "b"],
                    lambda total: recursive_doubling.allreduce(communicator, total),
                )  # fmt: skip
            assert bool(agreed)

        agree(1.6e38 if communicator.rank else 0.0)
        try:
            agree(mine if communicator.rank else other)
        except (NotFiniteError, RankError) as error:
            return f"{error.kind}: {error}"
        return ""

    assert all(text in reported and reported.startswith("not-finite: ") for reported in run(2, rank))

"""A step that fails, for every strategy: errors keep class and text, and NaN reaches no weight."""

from __future__ import annotations

import ast
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
from hpcdl.comm.arithmetic import BLOCK, all_finite
from hpcdl.core.errors import ConfigError, CorruptError, HpcdlError, NotFiniteError, RankError, carried, original
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import ROOT, selected
from tests.strategies.elastic_ranks import run
from tests.strategies.failing_ranks import TEXT

OVER_MPI = [name for name, info in STRATEGIES.items() if info.features.mpi and not info.features.lock_free]
ELASTIC = [name for name, info in STRATEGIES.items() if info.features.optimizers]


def case(strategy: str, fault: str, **changes: Any) -> dict[str, Any]:
    features = STRATEGIES[strategy].features
    servers = changes.pop("servers", int(features.servers))
    fixed = {"strategy": strategy, "fault": fault, "workers": 3 - servers, "servers": servers, "accumulate": 1}
    optimizer = features.optimizers[0] if features.optimizers else "momentum"
    return {**fixed, "optimizer": optimizer, "skips": False, "exchange": {}, "elastic": {}, "late": None, **changes}


AVERAGING = [name for name in OVER_MPI if STRATEGIES[name].features.equals_single]
NAN = {name: case(name, "nan") for name in AVERAGING} | {
    "fp16": case("ring", "nan", exchange={"compress": "fp16"}),
    "bf16": case("ring", "nan", exchange={"compress": "bf16"}),
    "accumulate": case("ring", "nan", accumulate=2),
    "one bucket": case("ring", "nan", exchange={"bucket_size": 1 << 20}),
    **{
        f"ps {placement}": case("ps", "nan", exchange={"placement": placement})
        for placement in STRATEGIES["ps"].features.placements
    },
    "ps backup": case("ps", "nan", exchange={"backup_workers": 1}, late=0),
}
ALONE = {f"{name} alone": case(name, "nan") for name in OVER_MPI if STRATEGIES[name].features.optimizers} | {
    "sync-easgd alone": case("sync-easgd", "nan", elastic={"period": 2}),
    "diloco alone": case("diloco", "nan", elastic={"period": 3}),
    "streaming-diloco alone": case("streaming-diloco", "nan", elastic={"period": 3, "fragments": 1}),
}
"""The other workers continue without worker 1; with sync-easgd and both diloco until the next exchange."""
DROPPED = {"ps backup dropped": case("ps", "nan", exchange={"backup_workers": 1}, late=1)}
SKIPPING = {"skips": case("ring", "nan", skips=True), "ps skips": case("ps", "nan", skips=True)}
IN_STEP = {"streaming-diloco": {"overlap": 0}}
"""Settings with which an exchange begins and ends in the same step."""
ERRORS = {
    f"{name} fails": case(name, ("RankError", "CorruptError")[number % 2], elastic=IN_STEP.get(name, {}))
    for number, name in enumerate(OVER_MPI)
} | {f"sync-easgd {variant}": case("sync-easgd", "RankError", elastic={"variant": variant}) for variant in "12"}
CASES = NAN | ALONE | DROPPED | SKIPPING | ERRORS
SOAKED = {
    "tree", "recursive-doubling", "halving-doubling", "mpi", "bf16", "ps round-robin", "ps greedy", "tree fails",
    "recursive-doubling fails", "halving-doubling fails", "mpi fails", "async-msgd fails", "async-measgd fails",
    "async-sgd alone", "async-msgd alone", "async-measgd alone",
}  # fmt: skip
"""In the long version only: `make test-all` has one or two cases of each family."""


def of_each(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize with all these cases; those of SOAKED run in the long version only."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.soak) if name in SOAKED else name for name in cases]
    )


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The result of each worker's step, by selected case."""
    names = [name for name in selected(request, "name") if name in CASES]
    folder = tmp_path_factory.mktemp("failing")
    mpiexec = find_mpiexec()
    (folder / "cases.json").write_text(json.dumps([CASES[name] for name in names]))
    script = Path(__file__).with_name("failing_ranks.py")
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", "3", sys.executable, str(script)]
    subprocess.run(
        [*line, str(folder / "cases.json"), str(folder / "out.json")],
        check=True,
        env={**os.environ, **environment_for(mpiexec.flavour), "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)},
        timeout=900,
    )
    return dict(zip(names, json.loads((folder / "out.json").read_text()), strict=True))


@pytest.mark.mpi
@of_each(NAN)
def test_nan_ends_the_step_before_weights_move(results: dict[str, Any], name: str) -> None:
    """Worker 1 reports NaN in its own gradient with the variable; the other workers report the same on rank 1."""
    for rank, found in enumerate(results[name]):
        assert found["error"] == ("NotFiniteError" if rank == 1 else "RankError"), found
        assert "the gradient of first/kernel and 1 more is not finite at step 1 on rank 1" in found["text"]
        assert found["finite"] and not found["moved"]


@pytest.mark.mpi
@of_each(ALONE)
def test_nan_of_a_worker_with_weights_of_its_own_is_named_alike(results: dict[str, Any], name: str) -> None:
    """Worker 1 reports NaN as in an all-reduce and stops before its weights change; the others take their step."""
    other, bad = results[name][:2]
    assert bad["error"] == "NotFiniteError" and bad["finite"] and not bad["moved"], bad
    assert bad["text"] == "the gradient of first/kernel and 1 more is not finite at step 1 on rank 1"
    assert other["error"] == "NoneType" and other["moved"], other


@pytest.mark.mpi
@of_each(DROPPED)
def test_nan_that_comes_too_late_to_count_does_no_harm(results: dict[str, Any], name: str) -> None:
    """A backup worker's late gradient is dropped, NaN and all; all workers take the mean of the others."""
    for found in results[name]:
        assert found["error"] == "NoneType" and found["finite"] and found["moved"], found


@pytest.mark.mpi
@of_each(SKIPPING)
def test_a_loss_scale_skips_the_step(results: dict[str, Any], name: str) -> None:
    for found in results[name]:
        assert found["error"] == "NoneType" and found["finite"] and not found["moved"], found


@pytest.mark.mpi
@of_each(ERRORS)
def test_errors_keep_class_and_text(results: dict[str, Any], name: str) -> None:
    for found in results[name]:
        assert (found["error"], found["text"]) == (ERRORS[name]["fault"], TEXT)
        assert not found["moved"]


@pytest.mark.parametrize("name", ELASTIC)
def test_replicas_keep_nan_away_from_the_center(name: str) -> None:
    """Worker 1's replica reports a NaN gradient at its second step, whatever the other workers do."""

    def gradient(worker: int, step: int, weights: numpy.ndarray) -> numpy.ndarray:
        return numpy.full_like(weights, numpy.nan if worker == 1 and step == 1 else 0.1)

    with pytest.raises(NotFiniteError, match="the gradient is not finite on rank 1"):
        run(name, numpy.ones(50), gradient, workers=2, steps=4)


@pytest.mark.parametrize(
    ("dtype", "exponent"), [("float32", None), ("float64", None), ("float16", 0x7C00), ("uint16", 0x7F80)]
)
def test_what_is_not_finite_is_found_wherever_it_lies(dtype: str, exponent: int | None) -> None:
    values = numpy.full(2 * BLOCK + 7, 3, dtype)
    assert all_finite(values, exponent) and all_finite(values[:0], exponent)
    bad = [0x7F80, 0xFF80, 0x7FC0] if dtype == "uint16" else [numpy.inf, -numpy.inf, numpy.nan]
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 6):
        for value in bad:
            values[place] = value
            assert not all_finite(values, exponent)
        values[place] = 3


def test_large_numbers_are_finite() -> None:
    assert all_finite(numpy.full(1000, 3e38, numpy.float32))
    assert all_finite(numpy.full(1000, 60000, numpy.float16), 0x7C00)


@pytest.mark.parametrize(
    "error",
    [
        RankError("rank 2 (a: b) is gone", rank=2, host="node-é", exit_code=75),
        CorruptError('shard "x.h5":\n block 3 {{node}}'),
        ConfigError(["one", "two"]),
        KeyError("a"),
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_carried_comes_back(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(Exception, match="hpcdl-carries") as caught:
        carried(fail)()
    wrapped = RuntimeError(f"Graph execution error:\n\nUnknownError: CarriedError: {caught.value}\nTraceback\n[[node]]")
    found = original(wrapped)
    assert type(found) is type(error) and str(found) == str(error)
    if isinstance(error, HpcdlError):
        assert vars(found) == {name: [*v] if isinstance(v, tuple) else v for name, v in vars(error).items()}
    assert original(error) is error


def test_errors_that_nobody_knows_keep_their_name() -> None:
    class OddError(Exception):
        pass

    def fail() -> None:
        raise OddError("strange")

    with pytest.raises(Exception, match="hpcdl-carries") as caught:
        carried(fail)()
    assert str(original(caught.value)) == "OddError: strange"
    assert original(RuntimeError(str(caught.value)[:30])).args[0] == str(caught.value)[:30]


def test_every_function_in_a_graph_is_carried() -> None:
    for path in (ROOT / "hpcdl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("numpy_function", "py_function", "from_generator"):
                line = path.read_text().splitlines()[node.lineno - 1]
                assert f"{node.attr}(carried(" in line, f"{path}:{node.lineno}"

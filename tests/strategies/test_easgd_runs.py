"""The family on real MPI ranks, through the whole training: accuracy, resume, and workers that leave."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.strategies.table import find_strategy
from tests.conftest import DIGITS, CommandLine, selected

pytestmark = pytest.mark.mpi

RATES = {
    "sync-easgd": 0.05, "easgd": 0.05, "async-easgd": 0.05, "async-measgd": 0.01, "hogwild-easgd": 0.05,
    "async-sgd": 0.02, "async-msgd": 0.002, "hogwild-sgd": 0.02, "sync-sgd": 0.05,
}  # fmt: skip


@pytest.fixture(scope="module")
def digits(session_hpcdl: CommandLine) -> Path:
    """A split other than the `shards` fixture's, on which every method, `single` too, gets about 96 % right."""
    folder = session_hpcdl.home / "digits-1"
    options = ["--image-size", "28", "--split", "train=0.8,val=0.2", "--seed", "1"]
    finished = session_hpcdl(["shard", DIGITS, folder, *options])
    assert finished.code == 0, finished.err
    return folder


def case(strategy: str, data: Path, run_dir: Path, workers: int, **changes: Any) -> dict[str, Any]:
    servers = 1 if find_strategy(strategy).features.servers else 0
    settings = {
        "model": "lenet", "data": str(data), "strategy": strategy, "ranks": workers + servers, "batch-size": 16,
        "learning-rate": RATES[strategy], "deterministic": True, "run-dir": str(run_dir), "seed": 3,
    }  # fmt: skip
    return settings | {name.replace("_", "-"): value for name, value in changes.items()}


def run_cases(cases: list[dict[str, Any]], folder: Path) -> None:
    mpiexec = find_mpiexec()
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("digits_ranks.py")
    ranks = max(found["ranks"] for found in cases)
    finished = subprocess.run(
        [str(mpiexec.path), "-n", str(ranks), sys.executable, str(script), str(folder / "cases.json")],
        capture_output=True,
        text=True,
        env={**os.environ, **environment_for(mpiexec.flavour), "PYTHONPATH": str(Path.cwd())},
        timeout=280 + 60 * len(cases),
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]


def weights_of(run_dir: Path) -> list[np.ndarray]:
    """Return the weights in model.keras, in the order of their names."""
    found: list[np.ndarray] = []
    with zipfile.ZipFile(run_dir / "model.keras") as archive:
        content = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(content) as file:
        file.visititems(lambda _, item: found.append(item[...]) if isinstance(item, h5py.Dataset) else None)
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs that the selected tests of this module need, one after another on the same four processes."""
    asked = selected(request, "name")
    folder = tmp_path_factory.mktemp("runs")

    def short(name: str, strategy: str, workers: int, **changes: Any) -> dict[str, Any]:
        return case(strategy, digits, folder / name, workers, **{"steps": 30, **changes})

    signal = {"rank": 1, "step": 7, "kind": "signal"}
    cases = [
        case("sync-easgd", digits, folder / "sync-easgd", 3, epochs=20, target_accuracy=0.9),
        short("sync-whole", "sync-easgd", 3, period=2, compress="fp16"),
        short("sync-cut", "sync-easgd", 3, period=2, compress="fp16", plant=signal),
        short("sync-cut", "sync-easgd", 3, period=2, compress="fp16", resume=True),
        short("robin-whole", "easgd", 3),
        short("variant-2", "sync-easgd", 3, period=2, compress="fp16", variant="2"),
        short("groups", "sync-easgd", 4, groups=2),
        short("nan", "async-easgd", 3, plant={"rank": 1, "step": 4, "kind": "nan"}),
        short("exception", "async-sgd", 3, plant={"rank": 0, "step": 4, "kind": "exception"}),
        short("hogwild-sgd", "hogwild-sgd", 3),
        short("long", "async-easgd", 3, period=50),
        short("limit", "async-msgd", 3, steps=5000, time_limit=1),
        short("limit", "async-msgd", 3, steps=60, time_limit=600, resume=True),
    ]
    if "robin" in asked:
        cases += [short("robin-cut", "easgd", 3, plant=signal), short("robin-cut", "easgd", 3, resume=True)]
    if "signal" in asked:
        cases.append(short("signal", "hogwild-easgd", 3, plant={"rank": 2, "step": 4, "kind": "signal"}))
    run_cases(cases, folder)
    return folder


def test_learns_the_digits(runs: Path) -> None:
    """sync-easgd reaches 90 % accuracy; in the long version, below, all methods reach 97 %."""
    record = read_record(runs / "sync-easgd")
    assert max(point.val_accuracy or 0 for point in record.history) >= 0.9
    assert record.seconds_to_target is not None


@pytest.mark.parametrize("name", ["sync", pytest.param("robin", marks=pytest.mark.soak)])
def test_resumed_runs_leave_the_same_bits(runs: Path, name: str) -> None:
    """Resumed runs leave the same bits: one in half precision with an exchange every other step, one in float32."""
    assert (runs / f"{name}-cut" / "stopped-0.txt").exists()
    cut, whole = read_record(runs / f"{name}-cut"), read_record(runs / f"{name}-whole")
    (resumed_from,) = cut.resumed_from_steps
    assert 0 < resumed_from < 30 == cut.steps == whole.steps
    for a, b in zip(weights_of(runs / f"{name}-cut"), weights_of(runs / f"{name}-whole"), strict=True):
        assert a.tobytes() == b.tobytes()


def test_overlap_changes_no_bit(runs: Path) -> None:
    for a, b in zip(weights_of(runs / "variant-2"), weights_of(runs / "sync-whole"), strict=True):
        assert a.tobytes() == b.tobytes()


def left(record: RunRecord) -> list[str]:
    return [warning for warning in record.warnings if "left before the end" in warning]


@pytest.mark.parametrize(("name", "worker", "reason"), [
    ("nan", 1, "not finite"), ("exception", 0, "planted"),
    pytest.param("signal", 2, "a signal", marks=pytest.mark.soak),
])  # fmt: skip
def test_the_run_continues_without_a_worker_that_leaves(runs: Path, name: str, worker: int, reason: str) -> None:
    record = read_record(runs / name)
    assert record.status == "finished" and record.steps >= 30
    (warning,) = left(record)
    assert warning.startswith(f"worker {worker} left") and reason in warning
    assert all(np.isfinite(weight).all() for weight in weights_of(runs / name))


def test_a_time_limit_stops_everybody_and_the_run_can_be_resumed(runs: Path) -> None:
    stopped = (runs / "limit" / "stopped-0.txt").read_text()
    assert "the time limit" in stopped and "--resume" in stopped
    assert sorted(path.name for path in (runs / "limit").glob("stopped-*")) == [f"stopped-{i}.txt" for i in range(4)]
    record = read_record(runs / "limit")
    assert record.status == "finished" and len(record.resumed_from_steps) == 1


def test_what_a_run_shows(runs: Path) -> None:
    for name in ("exception", "hogwild-sgd"):
        record = read_record(runs / name)
        assert record.staleness_mean is not None and record.staleness_max is not None
        # A worker that left took its counts with it.
        assert sum(record.staleness_histogram.values()) >= record.steps * (2 / 3 if name == "exception" else 1)
    for rank in (rank for rank in read_record(runs / "sync-easgd").rank_records):
        assert rank.details["distance_to_center"]["mean"] > 0
        assert rank.parts["compute"] > 0 and rank.parts["update"] > 0
    server = read_record(runs / "robin-whole").rank_records[-1]
    assert server.role == "server" and server.details["exchanges"] == 30 * 3
    assert server.busy_seconds_per_step is not None and server.busy_seconds_per_step > 0


def test_a_period_that_is_long_for_the_run_is_warned_of(runs: Path) -> None:
    record = read_record(runs / "long")
    assert 30 <= record.steps < 50  # the exchange that completes the run comes before the period ends
    assert sum("is long for a run of 30 steps" in warning for warning in record.warnings) == 1
    assert not any("is long for a run" in warning for warning in read_record(runs / "sync-whole").warnings)


def test_groups_share_their_gradients(runs: Path) -> None:
    """Two chips of two groups: the ranks of a chip end at the same distance from the center."""
    ranks = read_record(runs / "groups").rank_records
    distances = [rank.details["distance_to_center"]["last"] for rank in ranks]
    assert distances[0] == distances[1] != distances[2] == distances[3]


@pytest.mark.soak
def test_all_nine_methods_reach_97_percent_with_four_workers(digits: Path, tmp_path: Path) -> None:
    cases = [case(name, digits, tmp_path / name, 4, epochs=25, target_accuracy=0.97) for name in RATES]
    run_cases(cases, tmp_path)
    for name in RATES:
        assert read_record(tmp_path / name).seconds_to_target is not None, name

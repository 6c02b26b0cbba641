"""Every strategy leaves a trace of its workers and servers that agrees with its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.comm.observed import BACKWARD, FORWARD, LAYER_UPDATE, PARTS
from hpcdl.core.records.run_record import read_record
from hpcdl.strategies.base.strategy import StrategyInfo
from hpcdl.strategies.table import STRATEGIES
from hpcdl.trace.file import RankTrace
from hpcdl.trace.findings import findings
from hpcdl.trace.steps import merge, read_run, steps_of
from tests.conftest import ROOT, CommandLine

STEPS, RANKS = 12, 3
MPI = [name for name, info in STRATEGIES.items() if info.features.mpi]
WITHOUT_MPI = [name for name in STRATEGIES if name not in (*MPI, "single")]
SENDS = ("ring", "async-easgd")
"""Strategies that exchange by messages between their ranks on any machine."""
SAMPLE = [*SENDS]
"""A strategy that waits for all ranks and one that does not; `make soak` tests the others."""


EARLY = ("ring", "tree")
"""Strategies that update weights while later buckets are still on their way."""
BUCKET_BYTES, BUCKETS = 500_000, 3


def settings(name: str, run_dir: Path) -> dict[str, Any]:
    more = {"bucket-size": BUCKET_BYTES} if name in EARLY else {}
    return more | {
        "model": "lenet", "data": "synthetic:mnist", "batch-size": 8, "steps": STEPS, "ranks": RANKS, "strategy": name,
        "run-dir": str(run_dir), "trace": "full", "warmup-steps": 2, "profile": "none",
    }  # fmt: skip


def run_all(names: list[str], folder: Path) -> Path:
    """Return a folder with a run of each strategy, all inside one mpiexec."""
    mpiexec = find_mpiexec()
    (folder / "cases.json").write_text(json.dumps([settings(name, folder / name) for name in names]))
    script = ROOT / "tests" / "strategies" / "digits_ranks.py"
    command = [str(mpiexec.path), "-n", str(RANKS), sys.executable, str(script), str(folder / "cases.json")]
    environment = {**os.environ, **environment_for(mpiexec.flavour), "XDG_CACHE_HOME": str(folder)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    (folder / "said").write_text(finished.stderr[-4000:])
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(SAMPLE, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def other_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all([name for name in MPI if name not in SAMPLE], tmp_path_factory.mktemp("runs"))


def check(name: str, run: Path) -> None:
    record, info = read_record(run), STRATEGIES[name]
    traces = read_run(run)
    assert [trace.rank for trace in traces] == list(range(record.ranks))
    assert [trace.role for trace in traces].count("server") == record.servers
    merged = merge(traces)
    for trace in traces:
        assert len(trace.points) >= 2 and len(trace.counters) > 0
        if trace.role == "worker":
            for part in PARTS:
                assert len(trace.spans(part)) >= (STEPS if info.features.synchronous else 1), part
            assert (len(trace.spans("bucket")) > 0) == (info.features.mpi)
        assert len(trace.spans("receiving")) > 0 or name not in SENDS
    updates = [trace.spans("updating") for trace in traces]
    assert [len(one) for one in updates] == [STEPS * BUCKETS if name in EARLY else 0] * record.ranks
    for spans in updates if name in EARLY else ():
        assert sorted(zip(spans["step"].tolist(), spans["bucket"].tolist(), strict=True)) == [
            (step, bucket) for step in range(STEPS) for bucket in range(BUCKETS)
        ]
        assert (spans["begin_s"] <= spans["end_s"]).all()
    check_layers([trace for trace in traces if trace.role == "worker"], info)
    steps = steps_of(merged, synchronous=info.features.synchronous, first=2)
    found = findings(merged, steps)
    path_s = sum(part.seconds_per_step for part in found.critical_path)
    assert path_s == pytest.approx(found.step_s, rel=0.02)
    if info.features.synchronous:
        assert found.steps == STEPS - 2
        assert found.parts == pytest.approx(dict(record.parts), rel=0.02, abs=0.02 * found.step_s)


def check_layers(workers: Sequence[RankTrace], info: StrategyInfo) -> None:
    """Check that all layers have spans forward, backward and of each update; TensorFlow 1 graphs record none."""
    for trace in workers:
        for kind in (FORWARD, BACKWARD, LAYER_UPDATE):
            spans = trace.spans(kind)
            names = {trace.names[code] for code in spans["bucket"].tolist()}
            assert names == ({"conv1", "conv2", "dense1", "logits"} if info.name != "grpc-ps" else set())
            assert len(spans) == len(trace.spans("compute")) * len(names)


@pytest.mark.mpi
@pytest.mark.parametrize("name", SAMPLE)
def test_a_strategy_leaves_a_trace(runs: Path, name: str) -> None:
    assert (runs / name / "record.json").exists(), (runs / "said").read_text()
    check(name, runs / name)


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in MPI if name not in SAMPLE])
def test_each_other_strategy_does_too(other_runs: Path, name: str) -> None:
    assert (other_runs / name / "record.json").exists(), (other_runs / "said").read_text()
    check(name, other_runs / name)


@pytest.mark.mpi
def test_the_command_reports_it(runs: Path, ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    messages = ask_hpcdl(["trace", runs / "ring", "--html", tmp_path / "a.html", "--to", "chrome", tmp_path / "a.gz"])
    assert messages.code == 0 and "Who waited for whom" in messages.out, messages.err
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>") and (tmp_path / "a.gz").stat().st_size
    document = ask_hpcdl(["trace", runs / "ring", "--json"]).json()
    assert (document["steps"], document["ranks"]) == (STEPS - 2, RANKS)
    both = ask_hpcdl(["trace", runs / "ring", runs / "async-easgd", "--json"]).json()
    assert len(both["traces"]) == 2
    reported = ask_hpcdl(["report", runs / "ring", "--out", tmp_path / "report", "--anonymous"])
    page = (tmp_path / "report" / "report.html").read_text()
    assert reported.code == 0 and "Critical path of a step" in page and os.uname().nodename not in page, reported.err
    for arguments, word in (
        ((runs / "ring", "--to", "otf2", tmp_path), "give a new name in an existing folder"),
        ((runs / "ring", "--to", "otf3", tmp_path / "x"), "did you mean 'otf2'"),
        ((runs / "ring", runs / "async-easgd", "--html", tmp_path / "x"), "go with one run only"),
        ((runs,), "is not a run directory, which has a record.json; name one"),
        ((tmp_path / "nowhere",), "is not a run directory"),
    ):
        refused = ask_hpcdl(["trace", *arguments])
        assert refused.code == 2 and word in refused.err and len(refused.err.splitlines()) == 1, refused.err


@pytest.mark.soak
@pytest.mark.parametrize("name", ["single", *WITHOUT_MPI])
def test_a_strategy_without_mpi_leaves_one_too(run_hpcdl: CommandLine, tmp_path: Path, name: str) -> None:
    given = settings(name, tmp_path / "run") | {"ranks": 1 if name == "single" else RANKS}
    words = [word for key, value in given.items() if key != "trace" for word in (f"--{key}", str(value))]
    allowed = [] if name == "single" else ["--allow-grpc"]
    finished = run_hpcdl(["train", "--trace", "full", *words, *allowed])
    assert finished.code == 0, finished.err
    check(name, tmp_path / "run")


SCRIPT = """\
import hpcdl
hpcdl.init()
import keras, numpy
keras.utils.set_random_seed(3)
layers = [keras.layers.Dense(32, name="one"), keras.layers.Dropout(0.5), keras.layers.Dense(4, name="two")]
model = keras.Sequential([keras.Input((8,)), *layers])
model.compile(hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
random = numpy.random.default_rng(hpcdl.rank())
model.fit(random.random((64, 8)), random.random((64, 4)), batch_size=8, epochs=2, verbose=0)
if hpcdl.rank() == 0:
    print("weights", hash(b"".join(variable.numpy().tobytes() for variable in model.weights)))
"""


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize("levels", [("full",), pytest.param(("off", "full"), marks=pytest.mark.soak)], ids="-".join)
def test_a_script_records_when_its_gradients_are_there(
    run_hpcdl: CommandLine, tmp_path: Path, levels: tuple[str, ...]
) -> None:
    """A script's trace has gradients of all layers but the first, from which others count; weights do not change.

    In every test training/test_steps_per_call.py checks that tracing changes no weights.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = []
    for level in levels:
        words = ["run", "--ranks", "2", "--trace", level, "--run-dir", tmp_path / level, tmp_path / "script.py"]
        finished = run_hpcdl(words, env={"PYTHONHASHSEED": "1"})
        assert finished.code == 0, finished.err
        ended += [line for line in finished.out.splitlines() if line.startswith("weights")]
    assert len(ended) == len(levels) and len({*ended}) == 1
    for trace in read_run(tmp_path / "full"):
        backward = trace.spans(BACKWARD)
        names = [trace.names[code] for code in backward["bucket"].tolist()]
        assert len(names) == 16 and set(names) <= {"sequential/one", "sequential/two"}
        assert not len(trace.spans(FORWARD)) and (backward["begin_s"] <= backward["end_s"]).all()

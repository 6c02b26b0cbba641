"""Traces are evidence: gradients are ready when the trace shows it, not when an assumption says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy
import pytest

from hpcdl.collectives.slices import plan_buckets
from hpcdl.launch.traced import traced_runs
from hpcdl.models.emulated import FORWARD
from hpcdl.predict.evidence import gather_evidence
from hpcdl.predict.jobs import lengths_of
from hpcdl.predict.network import UNKNOWN
from hpcdl.predict.timeline import simulate
from hpcdl.report.runs.findings import TracedRun
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import gather
from tests.conftest import CommandLine
from tests.predict.clusters import make_cluster, study
from tests.predict.test_timeline import job_of, usual

LATE, EARLY = ((0.3, 0.99), (1.0, 1.0)), ((0.3, 0.35), (0.99, 0.4), (1.0, 1.0))
BUCKET_BYTES, MODEL = 64 * 1024, "cifar10-quick"


@pytest.mark.parametrize("strategy", ["ring", "ps"])
def test_what_is_ready_early_is_hidden(strategy: str) -> None:
    late, early = (
        simulate(job_of(strategy, 8, bucket_bytes=8 << 20, ready=ready), usual(), UNKNOWN) for ready in (LATE, EARLY)
    )
    assert early.seconds < late.seconds and early.compute == late.compute


def test_measured_readiness_takes_the_place_of_the_assumption() -> None:
    """A measured readiness replaces the assumption: the step no longer depends on it."""
    for ready, changes in (((), True), (EARLY, False)):
        seconds = []
        for early in (0.0, 1.0):
            values = {**usual(), "early": numpy.array([early])}
            seconds.append(
                float(simulate(job_of("ring", 8, bucket_bytes=8 << 20, ready=ready), values, UNKNOWN).seconds[0])
            )
        assert (seconds[0] != seconds[1]) == changes


def traced(name: str, ready: tuple[tuple[float, float], ...]) -> TracedRun:
    return TracedRun(
        name=name, ranks=2, steps=10, step_s=1.0, hidden=None, gap_median_s=None, gap_p90_s=None, idle_s=0.0,
        recording=0.0, critical_path={}, gains_s={}, slow_ranks=(), ready=ready,
    )  # fmt: skip


def named(runs: list[Run]) -> list[Run]:
    return [dataclasses.replace(run, name=f"run{number}") for number, run in enumerate(runs)]


def test_the_trace_with_most_buckets_is_the_evidence_of_its_network() -> None:
    runs = named(study(make_cluster(6)))
    known = [traced("run4", LATE), traced("run5", EARLY), traced("elsewhere", (*EARLY[:1], *EARLY))]
    (found,) = gather_evidence(runs, None, traced=known)
    assert found.ready == EARLY and any("trace of run5" in line for line in found.remarks)
    assert {seen.job.ready for seen in found.monitors} == {EARLY}
    assert found.at("ring", 8, 8, 0).ready == EARLY
    (without,) = gather_evidence(runs, None, traced=known[2:])
    assert without.ready == () and not any("trace" in line for line in without.remarks)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, session_hpcdl: CommandLine) -> Path:
    """Real ranks under real MPI, one run traced; computing is a wait with a known backward pass."""
    folder = tmp_path_factory.mktemp("traced")
    for ranks, trace in ((1, ["--trace", "off"]), (2, ["--trace"])):
        done = session_hpcdl(
            ["train", "--model", f"emulated:{MODEL}:1s", "--data", "synthetic:cifar10@640", "--strategy", "ring",
             "--ranks", str(ranks), "--batch-size", "8", "--steps", "12", "--bucket-size", str(BUCKET_BYTES), *trace,
             "--profile", "none", "--run-dir", folder / str(ranks)]
        )  # fmt: skip
        assert done.code == 0, done.err
    return folder


@pytest.mark.mpi
def test_a_real_trace_has_the_backward_pass_as_it_was(real: Path) -> None:
    gathered = gather([real])
    (found,) = traced_runs(gathered.run_dirs, print)
    lengths = lengths_of(MODEL, None)
    buckets = plan_buckets([4 * length for length in lengths], BUCKET_BYTES, small_first=True)
    assert len(found.ready) == len(buckets)
    pieces = len(lengths)
    for (share, ready), bucket in zip(found.ready, buckets, strict=True):
        true = FORWARD + (1 - FORWARD) * (pieces - min(bucket)) / pieces
        assert ready == pytest.approx(true, abs=0.15), share
    (evidence,) = gather_evidence(gathered.runs, None, traced=[found])
    assert evidence.ready == tuple(found.ready)
    assert evidence.at("ring", 8, 8, 0).bucket_bytes == BUCKET_BYTES


@pytest.mark.mpi
def test_the_command_and_the_report_take_the_trace(real: Path, run_hpcdl: CommandLine, tmp_path: Path) -> None:
    asked = run_hpcdl(["predict", real, "--nodes", "4", "--strategy", "ring", "--json"])
    assert asked.code == 0, asked.err
    assert any("when gradients are ready comes from the trace of" in line for line in asked.json()["warnings"])
    report = run_hpcdl(["report", real, "--format", "json", "--out", tmp_path / "out", "--json"]).json()
    (item,) = report["prediction"]
    assert item["subject"] == f"emulated:{MODEL}:1s"
    assert any("when gradients are ready comes from the trace of" in line for line in item["warnings"])
    assert len(report["traces"][0]["ready"]) > 2

"""The shipped Cori study gives one curve per method, although the servers grow; its times are synthetic."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from hpcdl.config.load import as_toml_values
from hpcdl.config.study import load_study
from hpcdl.report.analysis.analyse import Analysis, analyse
from hpcdl.report.analysis.scaling import scaling_rows
from hpcdl.report.runs.sources import gather
from hpcdl.study.plan import StudyPoint, make_plan
from hpcdl.study.points import prepare_points
from tests.conftest import ROOT
from tests.report.synthetic import make_record, write_run

STEP_BYTES = 1.112e9
"""Bytes that the busiest server receives while a worker computes a step, from the point with 23 %."""
BUSIEST_MB = {1: 102.2, 2: 51.1, 8: 16.6, 32: 10.0, 64: 9.44}
"""MB on the busiest server, by number of servers; ResNet-50, greedy placement."""


def efficiency(point: StudyPoint) -> float:
    if not point.servers:
        return 0.95
    return min(1.0, STEP_BYTES / (BUSIEST_MB[point.servers] * 1e6 * point.workers))


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    folder = tmp_path_factory.mktemp("cori")
    study = load_study(ROOT / "share" / "hpcdl" / "studies" / "cori-resnet50.toml", {"repeats": 3})
    plan, run_plan = prepare_points(study, make_plan(study))
    chance = random.Random(0)
    for run in plan.runs:
        point = run.point
        rate = 10 * point.workers * efficiency(point) * chance.lognormvariate(0, 0.01)
        record = make_record(
            1, 10.0, images_per_second=rate, strategy=point.strategy, model=point.model, data=point.data,
            servers=point.servers, ranks=point.ranks, nodes=point.nodes, batch_per_rank=point.batch_size,
            global_batch=point.batch_size * point.workers, mode=study.plan.mode, repeat=run.repeat,
            config=as_toml_values(run_plan[point.number].config),
        )  # fmt: skip
        record = dataclasses.replace(record, workers=point.workers)
        write_run(Path(folder) / run.name, record)
    return analyse(gather([folder]))


def test_each_method_and_placement_is_one_curve_from_one_worker(analysis: Analysis) -> None:
    assert len(analysis.curves) == 6, "two placements of grpc-ps, three of ps, and the ring"
    for curve in analysis.curves:
        assert [point.n for point in curve.points] == [1, 8, 32, 128, 256, 512]
        assert curve.base.n == 1 and not curve.split
        assert all(len(point.runs) == 3 for point in curve.points)


def test_the_documents_efficiencies_come_out(analysis: Analysis) -> None:
    for row in scaling_rows(analysis.curves, analysis.varying):
        if row["strategy"] == "grpc-ps" and row["workers"] in (128, 512):
            expected = {128: (32, 0.87), 512: (64, 0.23)}[row["workers"]]
            assert (row["servers"], row["efficiency"]["mean"]) == (expected[0], pytest.approx(expected[1], rel=0.02))
            assert row["efficiency"]["low"] < expected[1] < row["efficiency"]["high"]
            assert row["settings"]["placement"] in ("round-robin", "greedy")
    assert any("servers change along a curve" in line for line in analysis.warnings)

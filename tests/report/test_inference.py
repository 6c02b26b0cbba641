"""A report shows records of `hpcdl infer` in their own table, and in no training curve."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.records.run_record import InferenceRecord, RankRecord, RunRecord
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.document import Bounds, Interval, Table
from hpcdl.report.runs.anonymous import anonymised
from hpcdl.report.runs.sources import gather
from hpcdl.report.sections.inference import build
from tests.conftest import CommandLine
from tests.report.synthetic import NOISE, make_record, write_run


def inferred(ranks: int, rate: float, *, kept: int = 0, **changes: Any) -> RunRecord:
    """Return a record of `hpcdl infer` on 1,000 samples."""
    found = InferenceRecord(
        splits=["val"], outputs=["output"], num_shards=10, num_computed=1000 - kept, num_kept=kept,
        batch_seconds_median=0.01, batch_seconds_p99=0.02, first_batch_seconds=0.5,
    )  # fmt: skip
    values: dict[str, Any] = {
        "status": "finished", "strategy": "infer", "model": "lenet", "data": "digits", "ranks": ranks, "workers": ranks,
        "batch_per_rank": 16, "global_batch": 16 * ranks, "images_per_second": rate, "intra_op_threads": 1,
        "config": {"onednn": "auto", "deterministic": False, "batch-size": 16, "out": "/home/eve/out"},
    }  # fmt: skip
    return RunRecord(**{**values, **changes}, inference=found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three repeats on 1, 2 and 4 ranks, a resumed run, a failed run and a training run."""
    for ranks, rate in ((1, 100.0), (2, 180.0), (4, 320.0)):
        for number, noise in enumerate(NOISE):
            write_run(tmp_path / "all" / f"{ranks}-{number}", inferred(ranks, rate * noise))
    write_run(tmp_path / "all" / "resumed", inferred(4, 4000.0, kept=900))
    write_run(tmp_path / "all" / "failed", inferred(4, 4000.0, status="failed", warnings=["all is NaN"]))
    write_run(tmp_path / "all" / "training", make_record(2))
    return tmp_path / "all"


def table_of(folder: Path) -> Table:
    section = build(analyse(gather([folder])))
    assert section is not None
    (table,) = section.items
    assert isinstance(table, Table)
    return table


def test_efficiency_is_against_the_fewest_ranks(folder: Path) -> None:
    table = table_of(folder)
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    assert [(row["ranks"], row["calls"]) for row in rows] == [(1, 3), (2, 3), (4, 3)]
    efficiencies = [row["efficiency"] for row in rows]
    assert [item.value for item in efficiencies if isinstance(item, Bounds)] == pytest.approx([1.0, 0.9, 0.8])
    rate = rows[2]["images/s"]
    assert isinstance(rate, Interval) and rate.value == pytest.approx(320.0) and rate.half


def test_other_settings_are_another_curve(folder: Path) -> None:
    config = {"onednn": "off", "deterministic": False, "batch-size": 16}
    write_run(folder / "plain", inferred(2, 50.0, config=config))
    rows = table_of(folder).rows
    assert len(rows) == 4 and "onednn off" in rows[-1] and Bounds(value=1.0, low=None, high=None) in rows[-1]


def test_gpus_are_another_curve_and_say_how_busy_they_were(folder: Path) -> None:
    assert "GPU utilisation" not in [column.name for column in table_of(folder).columns], "all on CPUs"
    ranks = [RankRecord(rank=rank, host="n", gpu_utilisation=share) for rank, share in enumerate((0.8, 0.9))]
    write_run(folder / "gpus", inferred(2, 5000.0, accelerators={"NVIDIA H200": 2}, rank_records=ranks))
    table = table_of(folder)
    assert [column.name for column in table.columns][-2:] == ["GPU", "GPU utilisation"]
    *others, last = table.rows
    assert len(others) == 3 and all(row[-2:] == ("", None) for row in others)
    name, busy = last[-2:]
    assert name == "NVIDIA H200" and isinstance(busy, Interval) and busy.value == pytest.approx(0.85)
    assert Bounds(value=1.0, low=None, high=None) in last, "a rate on GPUs is not compared with one on CPUs"


def test_training_and_inference_stay_apart(folder: Path) -> None:
    analysis = analyse(gather([folder]))
    assert [run.name for run in analysis.runs] == ["training"]
    assert {point.first.strategy for curve in analysis.curves for point in curve.points} == {"ring"}
    section = build(analysis)
    assert section is not None
    assert section.lines[0].startswith("Left out of the table: 2 calls") and section.lines[1] == "failed: all is NaN"


def test_no_place_in_an_anonymous_report(folder: Path) -> None:
    reported = str([dataclasses.asdict(item) for item in anonymised(gather([folder])).inferences])
    assert "eve" not in reported and "NaN" not in reported and "inference 1" in reported


def test_a_report_of_inference_alone(ask_hpcdl: CommandLine, folder: Path) -> None:
    alone = folder / "4-0"
    finished = ask_hpcdl(["report", alone, "--out", folder.parent / "report", "--json"])
    assert finished.code == 0, finished.err
    document = finished.json()
    assert document["scaling"] == [] and document["runs"] == []
    assert document["inference"][0]["images_per_second"] == pytest.approx(320 * NOISE[0])
    assert document["summary"] == ["Inference: at best 320 images/s with 4 ranks (lenet on digits, val; one call)."]
    every = ask_hpcdl(["report", folder, "--out", folder.parent / "every", "--json"]).json()["summary"]
    sentence = "Inference: at best 320 images/s with 4 ranks (lenet on digits, val; mean of 3 calls)."
    assert sentence in every, "the fastest of the three calls had 324"
    refused = ask_hpcdl(["predict", alone, "--nodes", "2"])
    assert refused.code == 2 and len(refused.err.strip().splitlines()) == 1, refused.err

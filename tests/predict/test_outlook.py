"""The report's section on larger sizes shows the numbers of `hpcdl predict` in every form, or the reason for none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.predict import calibration
from hpcdl.predict.answer import _changes
from hpcdl.predict.evidence import gather_evidence
from hpcdl.predict.forecast import Prediction, Range
from hpcdl.predict.jobs import StepJob
from hpcdl.predict.outlook import MOST_SIZES, MOST_STRATEGIES, MOST_SUBJECTS, outlooks
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.analysis.settings import by_varied_settings
from hpcdl.report.compose.build import compose
from hpcdl.report.document import Bounds, Figure, Section, Table
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import Gathered, gather
from tests.conftest import ROOT, CommandLine
from tests.predict.clusters import make_cluster, measured, study, write_study
from tests.report.synthetic import make_run


def section(runs: list[Run]) -> Section:
    analysis = analyse(Gathered(runs=tuple(runs)))
    document = compose(dataclasses.replace(analysis, outlooks=outlooks(analysis.runs)))
    return next(item for item in document.sections if item.name == "prediction")


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return study(make_cluster(6))


def test_the_section_has_forecasts_beyond_what_was_measured(runs: list[Run]) -> None:
    found = section(runs)
    tables = {item.title.partition(": ")[2]: item for item in found.items if isinstance(item, Table)}
    forecasts = tables["predicted steps"]
    largest = max(run.nodes for run in runs)
    assert {row[1] for row in forecasts.rows} == {largest * factor for factor in (2, 4, 8, 16)}
    for row in forecasts.rows:
        for cell in row[4:7]:
            assert isinstance(cell, Bounds) and cell.low and cell.value and cell.high
            assert cell.low < cell.value < cell.high
    held_out = {row[0]: row[4] for row in tables["the test on held-out sizes"].rows}
    assert {row[0]: row[9] for row in forecasts.rows} == held_out, "the error stands beside each forecast"
    assert {row[0] for row in tables["nodes from which efficiency is below 80 %"].rows} == set(held_out)
    assert any("the best from" in line for line in found.lines)
    figures = {item.name: item for item in found.items if isinstance(item, Figure)}
    assert set(figures) == {"prediction-1-throughput", "prediction-1-efficiency"}
    shown = {series.label: series for series in figures["prediction-1-throughput"].series}
    assert list(shown["ring, measured"].x) == [1, 2, 4]
    assert all(low < y < high for low, y, high in zip(shown["ring, predicted"].low, shown["ring, predicted"].y,
                                                      shown["ring, predicted"].high, strict=True)
               if low is not None and high is not None)  # fmt: skip


def test_indistinguishable_strategies_do_not_take_turns_as_the_best() -> None:
    def at(nodes: int, label: str, rate: float, off: float) -> Prediction:
        job = StepJob(strategy=label, model="lenet", nodes=nodes, workers=nodes, batch=32, lengths=(10,))
        bounds = Range(mean=rate, low=rate - off, high=rate + off)
        return Prediction(job=job, base=job, step_seconds=Range(mean=1.0, low=0.9, high=1.1), images_per_second=bounds,
                          efficiency=bounds, limited_by="", losses={}, faster={})  # fmt: skip

    near = [at(nodes, label, rate, 5) for nodes, rates in ((1, (100, 99)), (2, (198, 199)), (4, (390, 388)))
            for label, rate in zip(("ring", "tree"), rates, strict=True)]  # fmt: skip
    (change,) = _changes(near)
    assert (change["strategy"], change["nodes"], change["not_distinguishable"]) == ("ring", 1, ["tree"])
    far = [*near, at(8, "ring", 700, 5), at(8, "tree", 780, 5)]
    assert [(row["strategy"], row["nodes"], row["not_distinguishable"]) for row in _changes(far)] == [
        ("ring", 1, ["tree"]), ("tree", 8, []),
    ]  # fmt: skip


def test_records_of_real_runs_are_predicted_from() -> None:
    """Records of real runs are used; in tests/studies, servers that share one link limit `ps`."""
    analysis = analyse(gather([ROOT / "tests" / "studies" / "five-hosts"]))
    (found,) = outlooks(analysis.runs)
    assert {row["strategy"] for row in found.document["backtest"]} == {"ring", "ps", "sync-easgd"}
    rows = [row for row in found.document["predictions"] if row["strategy"] == "ps"]
    assert [row["nodes"] for row in rows] == [10, 20, 40, 80] and {row["limited_by"] for row in rows} == {"server"}
    efficiency = [row["efficiency"]["mean"] for row in rows]
    assert efficiency == sorted(efficiency, reverse=True) and efficiency[-1] < 0.2


def test_too_little_evidence_is_reported(runs: list[Run]) -> None:
    found = section([make_run(1, 100.0), make_run(1, 101.0)])
    assert found.items == []
    (line,) = found.lines
    assert line.startswith("lenet is left out: all runs of lenet have 1 worker") and "hpcdl train" in line


def test_two_kinds_of_nodes_are_predicted_apart(runs: list[Run]) -> None:
    """A report predicts two kinds of nodes separately; `hpcdl predict` refuses to mix them."""
    other = [
        dataclasses.replace(run, machine="knl", images_per_second=(run.images_per_second or 0) / 2) for run in runs
    ]
    here, there = outlooks([*runs, *other])
    assert (here.subject, there.subject) == ("cifar10-quick, lab", "cifar10-quick, knl")
    rates = [item.document["predictions"][0]["images_per_second"]["mean"] for item in (here, there)]
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.1)


def test_runs_that_differ_in_what_the_timeline_does_not_know_are_not_mixed(runs: list[Run]) -> None:
    halves = [dataclasses.replace(run, images_per_second=2 * (run.images_per_second or 0), parts={},
                                  config={**run.config, "precision": "mixed_bfloat16"}) for run in runs]  # fmt: skip
    found = outlooks(by_varied_settings([*runs, *halves]))
    assert [item.subject.partition(", ")[2] for item in found] == ["precision float32", "precision mixed_bfloat16"]


def test_forms_of_gradients_that_no_run_of_several_workers_has_are_left_out_and_reported(runs: list[Run]) -> None:
    config = {**runs[0].config, "compress": "topk:1%"}
    odd = [dataclasses.replace(run, name=f"{run.name}-odd", images_per_second=9.0, config=config)
           for run in runs if run.workers == 1 and run.strategy == "ring"]  # fmt: skip
    (mixed,), (plain,) = gather_evidence([*runs, *odd], None), gather_evidence(runs, None)
    assert (
        mixed.remarks[0]
        == f"{len(odd)} runs with --compress topk:1% left out: no run of several workers shows its cost"
    )
    assert dataclasses.replace(mixed, remarks=mixed.remarks[1:]) == plain
    with pytest.raises(UsageError, match="all runs have --compress topk:1%, of which no forecast is made: none of sev"):
        gather_evidence(odd, None)


def test_a_form_that_one_network_does_not_show_is_kept_of_another(runs: list[Run]) -> None:
    config = {**runs[0].config, "compress": "topk:1%"}
    coded = [
        dataclasses.replace(run, name=f"{run.name}-coded", config=config) for run in runs if run.strategy == "ring"
    ]
    alone = [dataclasses.replace(run, model="lenet") for run in coded if run.workers == 1]
    found = {one.model: one for one in gather_evidence([*runs, *coded, *alone], None)}
    assert "ring topk:1%" in found[runs[0].model].strategies
    assert "lenet" not in found


def test_a_report_of_many_settings_stays_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a report does not grow with its runs; the test counts calls instead of seconds."""
    cluster = make_cluster(5)
    batches = [dataclasses.replace(cluster, batch=batch) for batch in (16, 32, 64)]
    many = [measured(one, strategy, workers, 7) for one in batches for strategy in ("ring", "sync-easgd", "ps")
            for workers in (1, 2, 4, 8, 16, 32)]  # fmt: skip
    many += [dataclasses.replace(run, machine=f"machine{number}") for number in range(4) for run in many]
    sizes: list[int] = []
    calibrate = calibration.calibrate

    def counting(monitors, *others, **options):  # type: ignore[no-untyped-def]
        sizes.append(len(monitors))
        return calibrate(monitors, *others, **options)

    monkeypatch.setattr("hpcdl.predict.forecast.calibrate", counting)
    found = outlooks(many)
    assert len(found) == 5 and len(sizes) == 2 * MOST_SUBJECTS
    assert max(sizes) <= MOST_STRATEGIES * MOST_SIZES
    assert "of 54 runs" in found[0].left_out and "16 samples per worker" in found[0].left_out
    assert not found[4].document and "hpcdl predict" in found[4].left_out


def test_every_form_of_the_report_has_it(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    predicted = write_study(tmp_path / "study")
    finished = ask_hpcdl(["report", predicted, "--out", tmp_path / "out"])
    assert finished.code == 0, finished.err
    assert "predicted steps" in finished.out
    for name in ("report.html", "report.md"):
        text = (tmp_path / "out" / name).read_text()
        assert "Prediction" in text and "predicted steps" in text and "the best from" in text, name
    assert (tmp_path / "out" / "figures" / "prediction-1-throughput.svg").is_file()
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    (item,) = document["prediction"]
    largest = max(row["nodes"] for row in document["scaling"])
    nodes = ",".join(str(largest * factor) for factor in (2, 4, 8, 16))
    asked = ask_hpcdl(["predict", predicted, "--nodes", nodes, "--json"]).json()
    assert item["predictions"] == asked["predictions"] and item["backtest"] == asked["backtest"]
    assert item["crossings"] == asked["crossings"]

"""docs/example-report is what its study gives: whole, readable, and made by the study file beside it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from hpcdl.config.study import load_study
from hpcdl.core.records import RunRecord, read_record
from hpcdl.study.jobs import FILE_NAME as JOBS_FILE
from hpcdl.study.jobs import part_folder
from hpcdl.study.plan import PlannedRun, make_plan
from hpcdl.study.state import StudyState, read_state
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "example-report"
STUDY = load_study(FOLDER / "study.toml", {})
NODES = (1, 2, 3, 4, 5)


def parts() -> dict[Path, StudyState]:
    folders = [part_folder(FOLDER / "study", nodes) for nodes in NODES]
    return {folder: read_state(folder) for folder in folders}


def records() -> list[tuple[PlannedRun, RunRecord]]:
    """The finished runs; the part's own file may not have heard yet of one that ended while its sweep was killed."""
    planned = {run.name: run for run in make_plan(STUDY).runs}
    found = [
        (planned[run.name], read_record(folder / "runs" / run.name))
        for folder, state in parts().items()
        for run in state.runs
        if run.status != "waiting"
    ]
    return [(run, record) for run, record in found if record.status == "finished"]


def failed() -> list[RunRecord]:
    return [read_record(path.parent) for path in (FOLDER / "study").glob("*/failed/*/record.json")]


def test_it_is_one_two_and_four_workers_by_three_strategies() -> None:
    found = records()
    for run, record in found:
        assert (record.status, record.study, record.mode) == ("finished", STUDY.name, STUDY.plan.mode)
        assert (record.strategy, record.workers, record.repeat) == (run.point.strategy, run.point.workers, run.repeat)
        assert len(set(record.hosts)) == record.ranks == run.point.ranks, "each rank on a node of its own"
    sizes = {(record.strategy, record.workers) for _, record in found}
    everything = {(strategy, workers) for strategy in ("ring", "ps", "sync-easgd") for workers in (1, 2, 4)}
    assert sizes == everything - {("sync-easgd", 1)}, "which averages over workers, and would have one"


def test_each_part_was_a_job_and_knows_all_of_its_runs() -> None:
    jobs = json.loads((FOLDER / "study" / JOBS_FILE).read_text())["jobs"]
    assert [job["nodes"] for job in jobs] == list(NODES) and all(job["system"] == "slurm" for job in jobs)
    plan = make_plan(STUDY)
    left_out = {run.name for run in plan.runs if run.point.strategy == "sync-easgd" and run.point.workers == 1}
    assert {run.name for state in parts().values() for run in state.runs} == {run.name for run in plan.runs} - left_out


def test_the_failed_attempt_is_kept() -> None:
    assert failed() and len(failed()) == sum(run.attempts for state in parts().values() for run in state.runs)
    assert all(record.status == "failed" and "rank 1 on node" in record.message for record in failed())


def test_the_report_is_of_these_records() -> None:
    report = json.loads((FOLDER / "report" / "report.json").read_text())
    assert {run["name"].rpartition("/")[2] for run in report["runs"] if run["usable"]} == {
        run.name for run, _ in records()
    }
    repeats = Counter((record.strategy, record.workers) for _, record in records())
    assert {(row["strategy"], row["workers"]): row["n"] for row in report["scaling"]} == repeats
    uneven = len(set(repeats.values())) > 1
    assert uneven == any("uneven n" in line for line in report["warnings"])
    assert {item["law"] for item in report["fits"]} >= {"gustafson", "usl"}
    page = (FOLDER / "report" / "report.html").read_text()
    assert all(line.split()[0] in page for line in report["summary"])
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 2_000_000


TWO_CORES = ROOT / "docs" / "example-report-two-cores"


def test_the_real_example_is_trained_to_the_end_by_its_study() -> None:
    plan = make_plan(load_study(TWO_CORES / "study.toml", {}))
    found = {path.parent.name: read_record(path.parent) for path in TWO_CORES.glob("study/runs/*/record.json")}
    assert set(found) == {run.name for run in plan.runs} and {record.status for record in found.values()} == {
        "finished"
    }
    assert all(record.accuracy and record.accuracy > 0.95 for record in found.values())
    report = json.loads((TWO_CORES / "report" / "report.json").read_text())
    assert {run["name"].rpartition("/")[2] for run in report["runs"] if run["usable"]} == set(found)
    assert sum(path.stat().st_size for path in TWO_CORES.rglob("*") if path.is_file()) < 2_000_000


def test_intervals_of_the_example_are_below_a_twentieth() -> None:
    """Its computing is emulated, so they can be; the real one has those of a machine that others share."""
    rows = json.loads((FOLDER / "report" / "report.json").read_text())["scaling"]
    wide = [row for row in rows if row["images_per_second"]["ci95"] >= 0.05 * row["images_per_second"]["mean"]]
    assert rows and not wide

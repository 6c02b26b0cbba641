"""docs/example-report is what its study gives: whole, readable, and made by the study file beside it."""

from __future__ import annotations

import json

from hpcdl.config.study import load_study
from hpcdl.core.records import read_record
from hpcdl.study.plan import make_plan
from hpcdl.study.state import read_state
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "example-report"


def test_the_records_are_those_of_the_study() -> None:
    state = read_state(FOLDER / "study")
    study = load_study(FOLDER / "study.toml", {})
    assert state.count("finished") == len(state.runs) and len(state.runs) % study.plan.repeats == 0
    planned = {run.name: run for run in make_plan(study).runs}
    for run in state.runs:
        record = read_record(FOLDER / "study" / "runs" / run.name)
        assert (record.status, record.study, record.mode) == ("finished", study.name, study.plan.mode)
        point = planned[run.name].point
        assert (record.strategy, record.workers, record.repeat) == (point.strategy, point.workers, run.repeat)


def test_the_failed_attempts_are_kept() -> None:
    state = read_state(FOLDER / "study")
    failed = {
        path.parent.name: read_record(path.parent) for path in (FOLDER / "study" / "failed").glob("*/record.json")
    }
    assert failed and len(failed) == sum(run.attempts for run in state.runs)
    assert all(record.status == "failed" and record.message for record in failed.values())


def test_the_report_is_of_these_records() -> None:
    report = json.loads((FOLDER / "report" / "report.json").read_text())
    finished = [run for run in report["runs"] if run["usable"]]
    assert len(finished) == len(read_state(FOLDER / "study").runs)
    assert {row["n"] for row in report["scaling"]} == {3}
    page = (FOLDER / "report" / "report.html").read_text()
    assert all(line.split()[0] in page for line in report["summary"])

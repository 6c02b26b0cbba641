"""docs/example-report and docs/example-evidence follow from their studies, by the commands on their pages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from hpcdl.config.study import load_study
from hpcdl.core.records.run_record import read_record
from hpcdl.study.plan import make_plan
from tests.conftest import ROOT, CommandLine

FOLDER = ROOT / "docs" / "example-report"


def test_it_is_trained_to_the_end_by_its_study() -> None:
    plan = make_plan(load_study(FOLDER / "study.toml", {}))
    records = {path.parent.name: read_record(path.parent) for path in FOLDER.glob("study/runs/*/record.json")}
    assert set(records) == {run.name for run in plan.runs}
    assert {record.status for record in records.values()} == {"finished"}
    assert all(record.accuracy and record.accuracy > 0.95 for record in records.values())


def test_the_report_is_of_these_records() -> None:
    report = json.loads((FOLDER / "report" / "report.json").read_text())
    names = {path.parent.name for path in FOLDER.glob("study/runs/*/record.json")}
    assert {run["name"].rpartition("/")[2] for run in report["runs"] if run["usable"]} == names
    page = (FOLDER / "report" / "report.html").read_text()
    assert report["summary"] and all(line.split()[0] in page for line in report["summary"])
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 2_000_000


def test_the_evidence_is_of_its_records(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    folder = ROOT / "docs" / "example-evidence"
    shown = re.search(r"^ {4}hpcdl (report .*)$", (folder / "README.md").read_text(), re.MULTILINE)
    assert shown
    finished = ask_hpcdl([*shlex.split(shown[1]), "--out", tmp_path / "again", "--format", "html,json"], cwd=ROOT)
    assert finished.code == 0, finished.err
    again, kept = (json.loads((at / "evidence.json").read_text()) for at in (tmp_path / "again", folder / "document"))
    assert again | {"hpcdl": kept["hpcdl"]} == kept
    assert {item["verdict"] for item in kept["criteria"]} == {"met"}

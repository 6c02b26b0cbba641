"""`hpcdl runs` and `hpcdl diff`: the runs of a folder in one table, and two of them side by side."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from hpcdl.report.runs.listing import Difference
from tests.conftest import ROOT, CommandLine

STUDY = ROOT / "tests" / "studies" / "five-hosts"
RING = "2-nodes/runs/002-ring-2w-64b-r1"
SERVERS = "2-nodes/runs/004-ps-1w-64b-r2"


def test_runs_are_filtered_and_ordered(ask_hpcdl: CommandLine) -> None:
    found = ask_hpcdl(["runs", STUDY, "--where", "strategy=ring,ps", "--where", "workers>=2", "--where",
                       "status!=failed", "--sort", "images-per-second", "--reverse", "--json"])  # fmt: skip
    assert found.code == 0, found.err
    rows = found.json()["runs"]
    assert {row["strategy"] for row in rows} == {"ring", "ps"} and min(row["workers"] for row in rows) == 2
    rates = [row["images_per_second"] for row in rows]
    assert rates == sorted(rates, reverse=True) and len(rates) > 3
    assert rows[0]["settings"]["optimizer"] == "sgd"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_table_fits_and_no_name_is_broken(ask_hpcdl: CommandLine, columns: int) -> None:
    found = ask_hpcdl(["runs", STUDY], env={"COLUMNS": str(columns)})
    lines = found.out.splitlines()
    assert max(map(len, lines)) <= columns and sum(RING in line for line in lines) == 1
    assert lines[0].startswith("all: ") and "model emulated:lenet:2s:3%" in lines[0]
    assert "images/s" in found.out and "status" in found.out + lines[0]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_narrow_terminal_keeps_what_matters_and_stacks_the_rest(
    ask_hpcdl: CommandLine, tmp_path: Path, columns: int
) -> None:
    record = json.loads((STUDY / RING / "record.json").read_text())
    for number, name in enumerate(("first", "a-second-run-with-a-long-name")):
        (tmp_path / name).mkdir()
        own = record | {
            "workers": 2 + number,
            "images_per_second": 10.5 + number,
            "accuracy": 0.5,
            "status": "finished",
        }
        own["steps"] = 40 + number
        own["config"] = record["config"] | {
            f"{key}": f"{key}-of-{name}" for key in ("data", "shuffle", "schedule", "loss")
        }
        (tmp_path / name / "record.json").write_text(json.dumps(own))
    lines = ask_hpcdl(["runs", tmp_path], env={"COLUMNS": str(columns)}).out.splitlines()
    header = next(line for line in lines if "workers" in line)
    assert max(map(len, lines)) <= columns and "images/s" in header
    if columns == 80:
        assert "steps" not in header and any(line.startswith("    ") and "steps 41" in line for line in lines)
        assert any("a-second-run-with-a-long-name" in line and "11.5" in line for line in lines)
    else:
        assert "steps" in header and len(lines) <= 4


@pytest.mark.parametrize(
    "arguments, reported",
    [
        (["--where", "stratgy=ring"], "did you mean 'strategy'"),
        (["--where", "accuracy>x"], "compares numbers"),
        (["--where", "ring"], "write KEY=VALUE"),
        (["--sort", "acuracy"], "did you mean 'accuracy'"),
    ],
    ids=" ".join,
)
def test_a_slip_in_a_condition_is_one_line(ask_hpcdl: CommandLine, arguments: list[str], reported: str) -> None:
    refused = ask_hpcdl(["runs", STUDY, *arguments])
    assert refused.code == 2 and reported in refused.err and len(refused.err.splitlines()) == 1


def test_a_damaged_record_is_reported_and_the_others_listed(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    whole = (STUDY / RING / "record.json").read_text()
    for name, text in {
        "whole": whole,
        "cut": whole[:5000],
        "foreign": '{"schema": "x/1"}',
        "flat": _flat(whole),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    found = ask_hpcdl(["runs", tmp_path, "--json"])
    assert found.code == 0, found.err
    assert sorted(row["name"] for row in found.json()["runs"]) == ["flat", "whole"]
    assert len(found.json()["unreadable"]) == 2 and "cut" in found.err and "foreign" in found.err


def _flat(text: str) -> str:
    """Return a record on one line, as another program would write it."""
    return json.dumps(json.loads(text))


def test_two_runs_side_by_side(ask_hpcdl: CommandLine) -> None:
    found = ask_hpcdl(["diff", STUDY / RING, STUDY / SERVERS, "--json"])
    assert found.code == 0, found.err
    reported = {item["key"]: item for item in found.json()["differences"]}
    assert (reported["strategy"]["first"], reported["strategy"]["second"]) == ("ring", "ps")
    rate = reported["images_per_second"]
    first, second = (json.loads((STUDY / name / "record.json").read_text()) for name in (RING, SERVERS))
    measured = [record["images_per_second"] for record in (first, second)]
    assert [rate["first"], rate["second"]] == measured and "optimizer" not in reported
    assert rate["ratio"] == pytest.approx(measured[1] / measured[0])
    compared = ask_hpcdl(["diff", STUDY / RING, STUDY / SERVERS])
    shown = compared.out
    assert "one run each: runs of one setting differ too" in compared.err
    assert max(map(len, shown.splitlines()[2:])) <= 80 and f"x {measured[1] / measured[0]:.3f}" in shown
    same = ask_hpcdl(["diff", STUDY / RING, STUDY / RING])
    assert same.code == 0 and same.out.startswith("no difference")


def test_long_values_that_differ_are_not_cut_to_the_same_words(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(STUDY / RING, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
        record = json.loads((tmp_path / name / "record.json").read_text())
        record["config"]["profile"] = f"studies/of {name}/profiles/2-ranks-1-threads.toml"
        record["config"].pop("inject", None)  # an older version had no such setting
        record["config"] |= {"inject": ""} if name == "one" else {}
        (tmp_path / name / "record.json").write_text(json.dumps(record))
    reported = ask_hpcdl(["diff", tmp_path / "one", tmp_path / "two"]).out
    (line,) = [line for line in reported.splitlines() if "profile" in line]
    assert "of one/" in line and "of two/" in line and "inject" not in reported


def test_settings_that_an_older_record_lacks_are_no_difference(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Settings newer than a record are not listed as varying; one that may be unset is, if only one run gives it."""
    for name in ("old", "new"):
        shutil.copytree(STUDY / RING, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
        record = json.loads((tmp_path / name / "record.json").read_text())
        record["config"] |= {"label-smoothing": 0.25, "init-weights": "w.keras"} if name == "new" else {}
        if name == "old":
            for key in ("label-smoothing", "weight-decay"):
                record["config"].pop(key, None)
        (tmp_path / name / "record.json").write_text(json.dumps(record))
    listed = ask_hpcdl(["runs", tmp_path], env={"COLUMNS": "200"}).out
    assert "init-weights" in listed and "smoothing" not in listed and "weight-decay" not in listed
    reported = ask_hpcdl(["diff", tmp_path / "old", tmp_path / "new"]).out
    assert re.search(r"label-smoothing +not recorded +0.25", reported), reported
    rows = ask_hpcdl(["diff", tmp_path / "old", tmp_path / "new", "--json"]).json()["differences"]
    assert {row["key"]: row["first"] for row in rows}["label-smoothing"] is None


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [(2.0, 3.0, 1.5), (2.0, 0.0, 0.0), (0.0, 3.0, None), (2.0, math.nan, None), (-2.0, -3.0, None), (2.0, -3.0, None)],
)
def test_a_ratio_is_of_numbers_that_have_one(first: float, second: float, ratio: float | None) -> None:
    assert Difference(kind="result", key="loss", first=first, second=second).ratio == ratio


def test_a_folder_of_several_runs_is_no_run(ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(["diff", STUDY, STUDY / RING])
    assert refused.code == 2 and "name one of them" in refused.err

"""Each named folder or record becomes a run once, or a message says what is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import HistoryPoint, RankRecord, RunRecord, from_json, read_record
from hpcdl.report.runs.listing import list_runs
from hpcdl.report.runs.run import from_record
from hpcdl.report.runs.sources import gather, passed_over
from tests.report.synthetic import make_record, write_run

SERVED = [
    RankRecord(rank=0, host="a", rounds_per_step=2.0, round_bytes_per_step=8.0),
    RankRecord(rank=1, host="b", role="server", bytes_sent_per_step=5.0, busy_seconds_per_step=0.1,
               rounds_per_step=4.0, round_bytes_per_step=9.0),
]  # fmt: skip
HISTORY = [HistoryPoint(epoch=1.0, step=3, seconds=2.5, loss=None, val_accuracy=0.5, val_metrics={"r2": 0.25})]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        changes = {"rank_records": SERVED, "servers": 1, "ranks": number + 2} if number % 3 == 0 else {}
        record = make_record(number + 1, 10.0 + number, history=HISTORY * number, config={"seed": number}, **changes)
        write_run(tmp_path / f"r{number:02d}", record)
    for damaged in (2, 9):
        (tmp_path / f"r{damaged:02d}" / "record.json").write_text('{"schema": "hpcdl.run/1", "ranks": "many"}')
    return tmp_path


def test_runs_behind_links_and_in_closed_folders_are_not_left_out_without_a_word(folder: Path) -> None:
    """A link `latest` to a run of the folder is no other run; a run that is named as well is there."""
    runs, other = folder / "runs", folder / "other"
    for name in ("r00", "r01"):
        write_run(runs / name, make_record(2, 10.0))
    write_run(other / "r00", make_record(4, 20.0))
    (runs / "latest").symlink_to("r01")
    assert gather([runs]).remarks == ()
    (runs / "more").symlink_to(other / "r00")
    line = f"links are not followed, so their runs are left out; name them too: {runs / 'more'}"
    assert list_runs(runs)[1] == [line]
    assert line in gather([runs]).remarks and line not in gather([runs, runs / "more"]).remarks
    (folder / "links").mkdir()
    (folder / "links" / "more").symlink_to(other / "r00")
    with pytest.raises(UsageError, match=r"links are not followed, .*more$"):
        gather([folder / "links"])
    walked = [(str(runs), ["notes.txt"]), (str(runs / "r00"), ["record.json"])]
    assert f"folders that cannot be read are left out: {runs / 'r01'}" in passed_over(walked, [runs / "r00"])


def test_a_folder_is_read_whole_and_damaged_records_are_named(folder: Path) -> None:
    found = gather([folder])
    assert len(found.runs) == 10 and len(found.unreadable) == 2
    assert [name for name, _ in found.run_dirs] == [run.name for run in found.runs]
    assert any(run.server_loads for run in found.runs) and len(found.runs[-1].history) == 11


def test_what_two_paths_lead_to_is_read_once(folder: Path) -> None:
    twice = gather([folder, folder / "r11", folder])
    assert sorted(run.name for run in twice.runs) == sorted(
        f"r{number:02d}" for number in range(12) if number not in (2, 9)
    )


def test_runs_of_two_studies_that_have_one_name_are_distinguished(tmp_path: Path) -> None:
    """Runs of two studies with the same name stay apart, since traces, models and wall times are looked up by name."""
    for study in ("monday", "friday"):
        write_run(tmp_path / study / "runs" / "001-r1", make_record(1, 90.0, started_at=study))
    write_run(tmp_path / "friday" / "runs" / "002-r1", make_record(2, 180.0))
    found = gather([tmp_path / "monday", tmp_path / "friday"])
    twins = [str(tmp_path / study / "runs" / "001-r1") for study in ("monday", "friday")]
    assert sorted(run.name for run in found.runs) == sorted([*twins, "runs/002-r1"])
    assert dict(found.run_dirs)[twins[0]] == tmp_path / "monday" / "runs" / "001-r1"


def test_a_damaged_record_that_was_named_is_an_error(folder: Path) -> None:
    with pytest.raises(CorruptError, match=r"r02/record\.json is damaged: ranks is 'many'"):
        gather(sorted(folder.iterdir()))


TIMES = [0.5, 0.25, 1.0, 0.75, 0.5]
TOLD = {"step_seconds": TIMES, "warmup_steps": 1, "step_seconds_quantiles": {"95%": 0.9625}}


@pytest.mark.parametrize("indent", [1, None])
@pytest.mark.parametrize(
    "changes",
    [
        TOLD, TOLD | {"message": 'said "step_seconds": [1, 2'}, TOLD | {"step_seconds_quantiles": {}},
        TOLD | {"parts": {}}, TOLD | {"step_seconds": [0.5, 0.25, float("nan"), 1.0]},
        TOLD | {"config": {"step_seconds": [1.0, 2.0]}},
    ],
)  # fmt: skip
def test_a_record_is_read_alike_however_it_is_written(
    changes: dict[str, Any], indent: int | None, tmp_path: Path
) -> None:
    """Records with NaN are read alike: msgspec refuses NaN, so Python's parser reads them."""
    document = asdict(make_record(2, 50.0, **changes))
    (tmp_path / "record.json").write_text(json.dumps(document, indent=indent))
    found = read_record(tmp_path)
    assert repr(found) == repr(from_json(RunRecord, json.loads(json.dumps(document))))
    assert from_record(found, "r").step_seconds_p95 == pytest.approx(0.9625, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"step_seconds": ["x"]}, {"step_seconds": {"a": 1}}, {"step_seconds": None}, {"step_seconds": [[1.0]]},
        {"ranks": 2**63}, {"resumed_from_steps": [10**400]}, {"rank_records": [{"rank": 2**70, "host": "a"}]},
        {"images_per_second": True}, {"accuracy": 10**400},
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused_with_file_and_field(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(asdict(make_record(2, 50.0, **TOLD)) | changes))
    with pytest.raises(CorruptError, match=rf"record\.json is damaged: {next(iter(changes))}") as found:
        read_record(tmp_path)
    assert len(str(found.value).splitlines()) == 1


def test_a_default_does_not_stand_in_for_the_schema(tmp_path: Path) -> None:
    document = asdict(make_record(2, 50.0))
    for changed in ({**document, "schema": "hpcdl.run/2"}, {k: v for k, v in document.items() if k != "schema"}):
        (tmp_path / "record.json").write_text(json.dumps(changed))
        with pytest.raises(CorruptError, match=r"this hpcdl reads 'hpcdl\.run/1'"):
            read_record(tmp_path)


def test_a_record_that_is_no_json_is_shown_as_in_its_file(tmp_path: Path) -> None:
    content = json.dumps(asdict(make_record(2, 50.0, **TOLD)), indent=1).encode()[:-3] + b"?"
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(ValueError) as whole:
        json.loads(content)
    with pytest.raises(CorruptError) as found:
        read_record(tmp_path)
    assert str(whole.value) in str(found.value)


def test_a_copied_folder_counts_once_and_is_reported(tmp_path: Path) -> None:
    changes = {"started_at": "2026-01-01T00:00:00+0000", "seconds_total": 10.5}
    write_run(tmp_path / "a", make_record(2, 101.25, **changes))
    write_run(tmp_path / "b", make_record(2, 101.5, **changes))  # started within the same second
    shutil.copytree(tmp_path / "a", tmp_path / "a-copy")
    found = gather([tmp_path])
    assert [run.name for run in found.runs] == ["a", "b"]
    assert [name for name, _ in found.run_dirs] == ["a", "b"]
    assert found.remarks == ("1 run left out as a copy of another, with its start and its times: a-copy of a",)


@pytest.mark.parametrize("parts", [{"compute": 0.2, "another": 5.0}, {"compute": 0.7, "wait": -0.5}])
def test_a_step_is_the_sum_of_the_parts_that_are_known_and_possible(parts: dict[str, float]) -> None:
    run = from_record(make_record(1, 100.0, parts=parts, step_seconds=[0.2] * 50), "r")
    assert run.step_seconds == pytest.approx(0.2)

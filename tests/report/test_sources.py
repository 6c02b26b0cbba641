"""Folders and records that were named become runs, each once, or lines that say what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.errors import CorruptError
from hpcdl.core.records import HistoryPoint, RankRecord
from hpcdl.report.runs import sources
from hpcdl.report.runs.run import from_document, packed, parse_record, unpacked
from hpcdl.report.runs.sources import gather
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


def test_a_folder_is_read_whole_and_damaged_records_are_named(folder: Path) -> None:
    found = gather([folder])
    assert len(found.runs) == 10 and len(found.unreadable) == 2
    assert [name for name, _ in found.run_dirs] == [run.name for run in found.runs]
    assert any(run.server_loads for run in found.runs) and len(found.runs[-1].history) == 11


def test_two_processes_read_what_one_reads(
    folder: Path, second_processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = gather([folder])
    assert second_processes == []
    monkeypatch.setattr(sources, "MANY", 4)
    monkeypatch.setattr(sources, "_BLOCK", 2)
    assert gather([folder]) == alone
    with pytest.raises(CorruptError, match=r"r02/record\.json is damaged: ranks is 'many'"):
        gather(sorted(folder.iterdir()))
    assert len(second_processes) == 2


def test_a_run_comes_back_as_it_was_packed(folder: Path) -> None:
    for run in gather([folder]).runs:
        assert unpacked(json.loads(json.dumps(packed(run)))) == run


def test_what_two_paths_lead_to_is_read_once(folder: Path) -> None:
    twice = gather([folder, folder / "r11", folder])
    assert sorted(run.name for run in twice.runs) == sorted(
        f"r{number:02d}" for number in range(12) if number not in (2, 9)
    )


def test_a_damaged_record_that_was_named_is_an_error(folder: Path) -> None:
    with pytest.raises(CorruptError, match=r"r02/record\.json is damaged: ranks is 'many'"):
        gather(sorted(folder.iterdir()))


TIMES = [0.5, 0.25, 1.0, 0.75, 0.5]
TOLD = {"step_seconds": TIMES, "warmup_steps": 1, "step_seconds_quantiles": {"95%": 0.9625}}


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        (TOLD, True),
        (TOLD | {"message": 'said "step_seconds": [1, 2'}, True),
        (TOLD | {"step_seconds_quantiles": {}}, False),
        (TOLD | {"parts": {}}, False),
        (TOLD | {"step_seconds": [0.5, 0.25, float("nan"), 1.0]}, False),
        (TOLD | {"config": {"step_seconds": [1.0, 2.0]}}, False),
    ],
)
@pytest.mark.parametrize("indent", [1, None])
def test_steps_that_nothing_is_computed_from_are_not_parsed(
    changes: dict[str, Any], left_out: bool, indent: int | None
) -> None:
    content = json.dumps(asdict(make_record(2, 50.0, **changes)), indent=indent).encode()
    document = parse_record(content)
    assert (document["step_seconds"] == []) is left_out
    assert repr(from_document(document, "r")) == repr(from_document(json.loads(content), "r"))
    assert from_document(document, "r").step_seconds_p95 == pytest.approx(0.9625, rel=0.1)


@pytest.mark.parametrize(
    "changes", [{"step_seconds": ["x"]}, {"step_seconds": {"a": 1}}, {"step_seconds": None}, {"step_seconds": [[1.0]]}]
)
def test_steps_that_are_no_numbers_are_refused_though_nobody_needs_them(changes: dict[str, Any]) -> None:
    content = json.dumps(asdict(make_record(2, 50.0, **TOLD)) | changes).encode()
    with pytest.raises(TypeError, match="step_seconds"):
        from_document(parse_record(content), "r")


def test_a_record_that_is_no_json_is_told_as_it_stands_in_its_file() -> None:
    content = json.dumps(asdict(make_record(2, 50.0, **TOLD)), indent=1).encode()[:-3] + b"?"
    with pytest.raises(ValueError) as whole:
        json.loads(content)
    with pytest.raises(ValueError) as found:
        parse_record(content)
    assert str(found.value) == str(whole.value)

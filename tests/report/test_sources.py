"""Folders and records that were named become runs, each once, or lines that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdl.core.errors import CorruptError
from hpcdl.core.records import HistoryPoint, RankRecord
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


def test_what_two_paths_lead_to_is_read_once(folder: Path) -> None:
    twice = gather([folder, folder / "r11", folder])
    assert sorted(run.name for run in twice.runs) == sorted(
        f"r{number:02d}" for number in range(12) if number not in (2, 9)
    )


def test_a_damaged_record_that_was_named_is_an_error(folder: Path) -> None:
    with pytest.raises(CorruptError, match=r"r02/record\.json is damaged: ranks is 'many'"):
        gather(sorted(folder.iterdir()))

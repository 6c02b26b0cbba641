"""Records become the same runs whether one process reads them or two."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcdl.core.errors import CorruptError
from hpcdl.core.records import HistoryPoint, RankRecord
from hpcdl.report.runs import sources
from hpcdl.report.runs.sources import Gathered, gather
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


def read(paths: list[Path], monkeypatch: pytest.MonkeyPatch, many: int) -> tuple[Gathered, int]:
    """What was gathered, and by how many processes more."""
    forked, fork = [], os.fork
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "fork", lambda: forked.append(fork()) or forked[-1])
    monkeypatch.setattr(sources, "_MANY", many)
    found = gather(paths)
    monkeypatch.setattr(os, "fork", fork)
    return found, len(forked)


def test_two_processes_read_what_one_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, none = read([folder], monkeypatch, 100)
    shared, one = read([folder], monkeypatch, 4)
    assert (none, one) == (0, 1)
    assert shared == alone
    assert len(shared.runs) == 10 and len(shared.unreadable) == 2
    assert [name for name, _ in shared.run_dirs] == [run.name for run in shared.runs]
    assert any(run.server_loads for run in shared.runs) and len(shared.runs[-1].history) == 11


def test_what_two_paths_lead_to_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice, _ = read([folder, folder / "r11", folder], monkeypatch, 4)
    assert sorted(run.name for run in twice.runs) == sorted(
        f"r{number:02d}" for number in range(12) if number not in (2, 9)
    )


def test_a_damaged_record_that_was_named_is_an_error_of_either_half(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = sorted(folder.iterdir())
    with pytest.raises(CorruptError, match=r"r02/record\.json is damaged: ranks is 'many'"):
        read(named, monkeypatch, 4)
    with pytest.raises(CorruptError, match="r09"):
        read([path for path in named if path.name != "r02"], monkeypatch, 4)

"""metrics.jsonl stays readable whatever happens to the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcdl.run.journal import FileJournal, JournalReader, all_events, since_start


class FillingDisk:
    """A file that takes `room` bytes and no more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, content: bytes) -> int:
        """Write a part, then fail, as on a full disk."""
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return int(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 70, 100])
def test_a_full_disk_costs_events_and_says_how_many(tmp_path: Path, room: int) -> None:
    journal, reader = FileJournal(tmp_path), JournalReader(tmp_path)
    journal.write("message", text="one")
    file = journal._file
    journal._file = FillingDisk(file, room)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(3):
        journal.write("message", text="x" * 100)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    journal._file = file
    journal.write("message", text="two")
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gap = "warning: 3 events before this one are missing: the disk was full"
    assert [line["text"] for line in lines] == ["one", gap, "two"]
    assert [event["text"] for event in reader.read()] == ["one", gap, "two"]


def test_a_run_that_continues_appends(tmp_path: Path) -> None:
    for text in ("one", "two"):
        journal = FileJournal(tmp_path)
        journal.write("message", text=text)
        journal.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_new_supervisor_reads_the_messages_since_the_ranks_began(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    assert since_start(all_events(tmp_path)) == []
    for kind, number in [("start", 0), ("epoch", 1), ("start", 2), ("message", 3), ("epoch", 4)]:
        journal.write(kind, number=number)
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "num')  # its writer was killed
    assert [event["number"] for event in since_start(all_events(tmp_path))] == [2, 3, 4]

"""The trace file of a rank: a capped ring, complete after a kill, refused if damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.comm.clocks import ClockPoint
from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.trace.file import CHUNK, FACTS, MOST_NAMES, PAGE_BYTES, RECORD, TraceFile, read_trace

FACTS_OF_3 = {"rank": 3, "size": 8, "host": "node7", "role": "worker", "level": "full", "begin_s": 1.5, "wall_s": 2.5}


def traced(path: Path, num_bytes: int = 1 << 20) -> TraceFile:
    return TraceFile(path, num_bytes, FACTS_OF_3)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = traced(tmp_path / "rank-3.trace")
    file.add_point(ClockPoint(parent=2, own_s=1.0, parent_s=3.0, error_s=1e-6))
    file.write("later", 20.0, 21.0, 7, 1, -1, -1)
    file.write("sending", 10.0, 11.5, 1 << 40, 0, 5, 2)
    file.write("counter: memory", 12.0, 12.0, 99, -1, -1, -1)
    found = read_trace(file.path)  # while the file is open
    assert (found.rank, found.size, found.host, found.role, found.level) == (3, 8, "node7", "worker", "full")
    assert (found.begin_s, found.wall_s, found.parent) == (1.5, 2.5, 2)
    assert found.points.tolist() == [(1.0, 3.0, 1e-6)]
    assert [found.names[code] for code in found.records["name"]] == ["sending", "later"]
    assert found.records[["value", "step", "peer", "bucket"]].tolist() == [(1 << 40, 0, 5, 2), (7, 1, -1, -1)]
    assert found.counters["value"].tolist() == [99]
    assert len(found.spans("sending")) == 1 and len(found.spans("never")) == 0
    file.close()
    file.write("too late", 1.0, 1.0, 0, 0, 0, 0)
    copied = tmp_path / "copy"
    copied.write_bytes(b"".join(file.content()))
    assert len(read_trace(copied).records) == 3
    assert copied.stat().st_size == PAGE_BYTES + 4 * RECORD.itemsize


def test_records_whose_names_find_no_room_take_no_place(tmp_path: Path) -> None:
    file = traced(tmp_path / "rank-3.trace")
    for number in range(MOST_NAMES):
        file.write(f"span {number}", number, number, 0, 0, -1, -1)
    written = file.num_written
    for _ in range(3):
        file.write("one too many", 1.0, 2.0, 0, 0, -1, -1)
    assert file.num_written == written
    assert "" not in [read_trace(file.path).names[code] for code in read_trace(file.path).records["name"]]


def test_the_cap_holds_and_the_newest_stay(tmp_path: Path) -> None:
    file = traced(tmp_path / "rank-3.trace")
    for number in range(70_000):
        file.write("span", number, number, number, number, -1, -1)
    assert file.path.stat().st_size <= 1 << 20
    found = read_trace(file.path).records["step"]
    assert found[-1] == 69_999 and len(found) == 3 * CHUNK
    assert numpy.array_equal(found, numpy.arange(70_000 - len(found), 70_000))


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    file = traced(tmp_path / "rank-3.trace", 4 << 20)

    def write(thread: int) -> None:
        for number in range(5000):
            file.write(f"thread {thread}", number, number, number, thread, -1, -1)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    records = read_trace(file.path).records
    assert len(records) == 40_000
    for thread in range(8):
        mine = records[records["step"] == thread]
        assert mine["value"].tolist() == list(range(5000)) and len(set(mine["thread"])) == 1


def test_a_full_disk_makes_the_ring_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = traced(tmp_path / "rank-3.trace", 4 << 20)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for number in range(CHUNK + 10):
        file.write("span", number, number, number, number, -1, -1)
    assert read_trace(file.path).records["step"][[0, -1]].tolist() == [10, CHUNK + 9]
    with pytest.raises((HpcdlError, OSError), match="No space left"):
        traced(tmp_path / "rank-4.trace")


KILLED = """
import sys, time
from pathlib import Path
from hpcdl.trace.file import TraceFile
facts = {"rank": 0, "size": 1, "host": "h", "role": "worker", "level": "steps", "begin_s": 0, "wall_s": 0}
file = TraceFile(Path(sys.argv[1]), 1 << 20, facts)
for number in range(10_000_000):
    file.write("span", number, number + 1, number, number, -1, -1)
    if number == 20_000:
        print("go", flush=True)
"""


def test_a_killed_process_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.trace"
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        process.send_signal(signal.SIGKILL)
    steps = read_trace(path).records["step"]
    assert steps[-1] >= 20_000 and numpy.array_equal(steps, numpy.arange(steps[0], steps[-1] + 1))


def test_damaged_files_are_refused_or_read_without_what_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.trace"
    file = traced(path)
    file.write("span", 1.0, 2.0, 0, 0, -1, -1)
    content = path.read_bytes()
    for damaged in (b"", content[:100], b"x" + content[1:], content[:8] + b"\xff" * 200 + content[208:]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptError):
            read_trace(path)
    twice = traced(tmp_path / "twice.trace")
    for parent_s in (7.0, 8.0):  # of two points at one time no drift follows
        twice.add_point(ClockPoint(parent=2, own_s=5.0, parent_s=parent_s, error_s=1e-6))
    with pytest.raises(CorruptError, match="its clock shows no time"):
        read_trace(twice.path)
    broken = numpy.zeros(3, RECORD)
    broken["name"], broken["begin_s"], broken["end_s"] = (1, 60_000, 1), (5, 1, numpy.nan), (4, 2, 1)
    path.write_bytes(content[:PAGE_BYTES] + broken.tobytes() + b"torn")
    assert len(read_trace(path).records) == 0
    assert FACTS.itemsize <= PAGE_BYTES and CHUNK * RECORD.itemsize % 65536 == 0

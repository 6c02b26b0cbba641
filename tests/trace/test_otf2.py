"""A trace as an OTF2 archive, read back by OTF2's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.comm.observed import PARTS
from hpcdl.core.errors import UsageError
from hpcdl.trace.steps import merge, read_run
from hpcdl.trace.viewers import VIEWERS
from tests.conftest import CommandLine
from tests.trace.made import synchronous
from tests.trace.test_viewers import COMPUTE_S, INPUT_S

otf2 = pytest.importorskip("otf2", reason="the library has wheels for Python 3.11 and below", exc_type=ImportError)


def read_archive(folder: Path) -> tuple[Any, dict[str, list[tuple[int, str, str, Any]]]]:
    """Return the archive's clock and its events by location, read by OTF2's own reader."""
    found: dict[str, list[tuple[int, str, str, Any]]] = {}
    with otf2.reader.open(str(folder / "traces.otf2")) as archive:
        for location in archive.definitions.locations:
            found[f"{location.name} on {location.group.system_tree_parent.name}"] = []
        for location, event in archive.events:
            where = f"{location.name} on {location.group.system_tree_parent.name}"
            step = next(iter((event.attributes or {}).values()), None)
            found[where].append((event.time, type(event).__name__, event.region.name, step))
        return archive.definitions.clock_properties, found


def spans_of(events: list[tuple[int, str, str, Any]]) -> list[tuple[str, int, int, int]]:
    """Return region, begin, end and step of each entered and left region; fails unless regions nest."""
    found, entered = [], []
    for ticks, kind, region, step in events:
        if kind == "Enter":
            entered.append((region, ticks, step if step is not None else entered[-1][2]))
        else:
            name, begin, number = entered.pop()
            assert (kind, name) == ("Leave", region)
            found.append((name, begin, ticks, number))
    assert not entered
    return found


def test_otf2s_reader_finds_the_parts_of_steps_where_they_were(tmp_path: Path) -> None:
    merged, steps = synchronous(INPUT_S, COMPUTE_S)
    VIEWERS["otf2"](merged, tmp_path / "archive")
    clock, found = read_archive(tmp_path / "archive")
    assert list(found) == ["rank 0 on host0", "rank 1 on host1", "rank 2 on host2"]
    for row, events in enumerate(found.values()):
        spans = spans_of(events)
        assert [span[0] for span in spans] == 20 * [*PARTS, "step"]
        for name, begin, end, step in spans:
            place = PARTS.index(name) if name in PARTS else 0
            last = place + 1 if name in PARTS else 5
            expected_s = steps.borders[row, step, [place, last]]
            assert numpy.array([begin, end]) == pytest.approx(expected_s * 1e9, abs=2e3), (name, step)
    assert (clock.timer_resolution, clock.global_offset) == (10**9, 0)
    assert clock.trace_length == pytest.approx(float(steps.borders.max()) * 1e9, abs=2e3)
    assert clock.realtime_timestamp == 0, "the first event was at the wall clock's time 0, not when it was written"
    with pytest.raises(UsageError, match="this is there; choose another name"):
        VIEWERS["otf2"](merged, tmp_path / "archive")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.mpi
def test_otf2s_own_reader_reads_a_run_of_two_ranks(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    line = ["train", "--model", "lenet", "--data", "synthetic:mnist", "--batch-size", "8", "--strategy", "ring"]
    line += ["--ranks", "2", "--steps", "8", "--profile", "none", "--run-dir", str(run)]
    assert session_hpcdl(line, timeout_s=300).code == 0
    reported = session_hpcdl(["trace", run, "--to", "otf2", archive])
    assert reported.code == 0, reported.err
    clock, found = read_archive(archive)
    merged = merge(read_run(run))
    assert [name.split(" on ")[0] for name in found] == ["rank 0", "rank 1"]
    for rank, events in enumerate(found.values()):
        spans = spans_of(events)
        for name in PARTS:
            own = merged.spans(rank, name)
            ended = [(step, (end - begin) / clock.timer_resolution) for part, begin, end, step in spans if part == name]
            assert len(ended) >= 8 and [step for step, _ in ended] == own["step"].tolist()
            assert [long_s for _, long_s in ended] == pytest.approx((own["end_s"] - own["begin_s"]).tolist(), abs=1e-5)
    ended = next(event["at"] for event in events_of(run) if event["kind"] == "epoch")
    assert -1 < ended - (clock.realtime_timestamp + clock.trace_length) / 1e9 < 30, "by the wall clock of the journal"
    again = session_hpcdl(["trace", run, "--to", "otf2", archive])
    assert again.code == 2 and "give a new name in an existing folder" in again.err

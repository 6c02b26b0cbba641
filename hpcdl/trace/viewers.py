"""Traces for other viewers: Chrome's JSON for Perfetto, and OTF2 for Score-P, Vampir and Scalasca.

Chrome's form is gzipped JSON, which Perfetto's trace processor and page read directly. OTF2's own library writes its
archive, a folder with `traces.otf2` to open. Each rank is a location with the regions of its steps' parts, inside a
region `step` with its number. Overlapping spans (buckets, messages, layers) cannot nest as regions must.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import BACKWARD, BUCKET, FORWARD, LAYER_UPDATE, PARTS, RECEIVING, SENDING, UPDATING
from hpcdl.core.errors import UsageError
from hpcdl.core.storage.disk import check_output, move, private_folder, writing_output
from hpcdl.trace.file import COUNTER
from hpcdl.trace.recorder import COLLECTOR
from hpcdl.trace.steps import Merged

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

TICKS = 10**9
"""Ticks per second."""
ARCHIVE = "traces"
STEP = "step"


def write_otf2(merged: Merged, path: Path) -> None:
    """Write the archive into the new folder `path`. Raises UsageError if that exists, or if the library is missing."""
    if importlib.util.find_spec("otf2") is None:
        raise UsageError(
            "--to otf2: its library is not installed; pip install 'hpcdl[otf2]', or use --to perfetto or --to chrome"
        )
    if path.exists():
        raise UsageError(f"cannot write {path}: --to otf2 makes a folder, and this is there; choose another name")
    check_output(path)
    # OTF2 writes many files: a killed process must not leave half an archive under this name.
    with private_folder(".otf2-", path.absolute().parent) as folder:
        _write(merged, folder / ARCHIVE)
        move(folder / ARCHIVE, path)


def _write(merged: Merged, folder: Path) -> None:
    import otf2

    ranks = merged.ranks
    start_s = min((float(merged.records[rank]["begin_s"].min()) for rank in ranks), default=0.0)
    with otf2.writer.open(str(folder), archive_name=ARCHIVE, timer_resolution=TICKS) as archive:
        archive.creator = "hpcdl"
        definitions = archive.definitions
        regions = {name: definitions.region(name) for name in (STEP, *PARTS)}
        number = definitions.attribute(STEP, "number of the step", otf2.Type.INT64)
        machine = definitions.system_tree_node("machine", class_name="machine", parent=None)
        hosts: dict[str, Any] = {}
        first_ticks: list[int] = []
        for rank in sorted(merged.traces):
            trace = merged.traces[rank]
            if trace.host not in hosts:
                hosts[trace.host] = definitions.system_tree_node(trace.host, class_name="node", parent=machine)
            group = definitions.location_group(f"rank {rank} ({trace.role})", system_tree_parent=hosts[trace.host])
            writer = archive.event_writer(f"rank {rank}", group=group)
            events = _events(merged, rank, start_s)
            first_ticks += [ticks for ticks, *_ in events[:1]]
            for ticks, name, enters, step in events:
                if enters:
                    writer.enter(ticks, regions[name], attributes={number: step} if name == STEP else None)
                else:
                    writer.leave(ticks, regions[name])
        if first_ticks:
            # The library uses the time of writing as the time of the first event.
            archive._realtime_timestamp = _wall_s(merged, start_s + min(first_ticks) / TICKS)


def _wall_s(merged: Merged, time_s: float) -> float:
    """Return the wall clock, in Unix seconds, at `time_s` of rank 0's clock, by the first rank that has spans."""
    rank = merged.ranks[0]
    trace = merged.traces[rank]
    own_s, common_s = float(trace.records["begin_s"].min()), float(merged.records[rank]["begin_s"].min())
    return trace.wall_s + own_s - trace.begin_s + time_s - common_s


def _events(merged: Merged, rank: int, start_s: float) -> list[tuple[int, str, bool, int]]:
    """Return ticks since the first span, the region, whether it begins, and the step, in order and properly nested."""
    entries: list[tuple[int, str, bool, int]] = []
    columns = [merged.spans(rank, name) for name in PARTS]
    numbers = columns[0]["step"]
    for column in columns[1:]:
        numbers = numpy.intersect1d(numbers, column["step"])
    complete = [column[numpy.isin(column["step"], numbers)] for column in columns]
    before = 0
    for rows in zip(*complete, strict=True):
        borders_s = numpy.array([*(row["begin_s"] for row in rows), rows[-1]["end_s"]])
        ticks = numpy.maximum.accumulate(numpy.rint((borders_s - start_s) * TICKS).astype(numpy.int64))
        ticks = numpy.maximum(ticks, before)  # rounding must not let a step begin before the previous one has ended
        step, before = int(rows[0]["step"]), int(ticks[-1])
        entries.append((int(ticks[0]), STEP, True, step))
        for name, begin, end in zip(PARTS, ticks[:-1].tolist(), ticks[1:].tolist(), strict=True):
            entries += [(begin, name, True, step), (end, name, False, step)]
        entries.append((before, STEP, False, step))
    return entries


LANES = ("step", "buckets", "messages", "collector", "beside steps", "updates", "layers", "updates of layers")
"""A viewer's rows for a rank. Overlapping spans within a row appear below one another."""


_OF_LAYERS = (6, 7)  # rows whose spans hold the index of a layer's name in place of a bucket


def lane_of(name: str) -> int:
    """Return the row of LANES for spans with that name."""
    if name in PARTS:
        return 0
    layers = {FORWARD: 6, BACKWARD: 6, LAYER_UPDATE: 7}
    special = layers | {BUCKET: 1, UPDATING: 5, SENDING: 2, RECEIVING: 2, COLLECTOR: 3}
    # comm/observed.py calls collectives `a barrier`, `an all-reduce`.
    return special.get(name, 2 if name.startswith(("a ", "an ")) else 4)


def events(merged: Merged) -> Iterator[dict[str, Any]]:
    """Yield Chrome's events (Trace Event Format): times in microseconds since the first span, a process per rank."""
    start_s = min((float(merged.records[rank]["begin_s"].min()) for rank in merged.ranks), default=0.0)
    for rank in merged.ranks:
        trace = merged.traces[rank]
        label = {"name": f"rank {rank} ({trace.role} on {trace.host})"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": label}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for lane, lane_name in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": lane_name}}
        yield from _spans(merged, rank, start_s)
        yield from _counters(merged, rank, start_s)


def _spans(merged: Merged, rank: int, start_s: float) -> Iterator[dict[str, Any]]:
    trace, records = merged.traces[rank], merged.records[rank]
    lanes = [lane_of(name) for name in trace.names]
    # Nanoseconds: more digits would only make the file longer.
    begin_us = ((records["begin_s"] - start_s) * 1e6).round(3).tolist()
    long_us = ((records["end_s"] - records["begin_s"]) * 1e6).round(3).tolist()
    columns = (records[name].tolist() for name in ("name", "step", "peer", "bucket", "value"))
    for begin, long, code, *numbers in zip(begin_us, long_us, *columns, strict=True):
        pairs = zip(("step", "peer", "bucket", "bytes"), numbers, strict=True)
        facts = {key: number for key, number in pairs if number >= 0 and (key != "bytes" or number)}
        name = trace.names[code]
        if lanes[code] in _OF_LAYERS:
            name = f"{name} {trace.names[facts.pop('bucket')]}"
        event = {"ph": "X", "name": name, "pid": rank, "tid": lanes[code], "ts": begin}
        yield {**event, "dur": max(long, 0.0), "args": facts}


def _counters(merged: Merged, rank: int, start_s: float) -> Iterator[dict[str, Any]]:
    """Yield the counts of each second by this rank's clock, whose error is negligible compared with a second."""
    trace = merged.traces[rank]
    shift_s = 0.0
    if len(trace.records):
        shift_s = float(merged.records[rank]["begin_s"][0] - trace.records["begin_s"][0])
    for record in trace.counters:
        name = trace.names[record["name"]].removeprefix(COUNTER)
        at_us = round((float(record["begin_s"]) + shift_s - start_s) * 1e6, 3)
        yield {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": at_us, "args": {"value": int(record["value"])}}


def write_chrome(merged: Merged, path: Path) -> None:
    """Write the events as gzipped JSON, one per line."""
    clocks = [vars(clock) for clock in merged.clocks]
    with writing_output(path) as temporary, gzip.open(temporary, "wt", compresslevel=5, encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps({"clocks": json.dumps(clocks)}))
        file.write(',"traceEvents":[\n')
        separator = ""
        for event in events(merged):
            file.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


VIEWERS: dict[str, Callable[[Merged, Path], None]] = {
    "perfetto": write_chrome,
    "chrome": write_chrome,
    "otf2": write_otf2,
}
"""The values of `--to`."""

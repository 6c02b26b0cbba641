"""Traces for other viewers: Chrome's JSON, gzip'd, which Perfetto's trace processor and page read as it is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import BACKWARD, BUCKET, FORWARD, LAYER_UPDATE, PARTS, RECEIVING, SENDING, UPDATING
from hpcdl.core.storage.disk import writing_output
from hpcdl.trace.file import COUNTER
from hpcdl.trace.merge import Merged
from hpcdl.trace.otf2 import write_otf2
from hpcdl.trace.recorder import COLLECTOR

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

LANES = ("step", "buckets", "messages", "collector", "beside steps", "updates", "layers", "updates of layers")
"""A viewer's rows of a rank: what overlaps within one stands below one another there."""


_OF_LAYERS = (6, 7)


def lane_of(name: str) -> int:
    """The row of LANES that spans of that name are drawn in."""
    if name in PARTS:
        return 0
    layers = {FORWARD: 6, BACKWARD: 6, LAYER_UPDATE: 7}
    special = layers | {BUCKET: 1, UPDATING: 5, SENDING: 2, RECEIVING: 2, COLLECTOR: 3}
    return special.get(name, 2 if name.startswith(("a ", "an ")) else 4)


def events(merged: Merged) -> Iterator[dict[str, Any]]:
    """Chrome's events (Trace Event Format): times in microseconds since the first span, a process for each rank."""
    start_s = min((float(merged.records[rank]["begin_s"].min()) for rank in merged.ranks), default=0.0)
    for rank in merged.ranks:
        trace = merged.traces[rank]
        label = {"name": f"rank {rank} ({trace.role} on {trace.host})"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": label}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for lane, words in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": words}}
        yield from _spans(merged, rank, start_s)
        yield from _counters(merged, rank, start_s)


def _spans(merged: Merged, rank: int, start_s: float) -> Iterator[dict[str, Any]]:
    trace, records = merged.traces[rank], merged.records[rank]
    lanes = [lane_of(name) for name in trace.names]
    begin_us = ((records["begin_s"] - start_s) * 1e6).round(3).tolist()
    long_us = ((records["end_s"] - records["begin_s"]) * 1e6).round(3).tolist()
    columns = (records[name].tolist() for name in ("name", "step", "peer", "bucket", "value"))
    for begin, long, code, *numbers in zip(begin_us, long_us, *columns, strict=True):
        known = zip(("step", "peer", "bucket", "bytes"), numbers, strict=True)
        facts = {key: number for key, number in known if number >= 0 and (key != "bytes" or number)}
        name = trace.names[code]
        if lanes[code] in _OF_LAYERS:
            name = f"{name} {trace.names[facts.pop('bucket')]}"
        event = {"ph": "X", "name": name, "pid": rank, "tid": lanes[code], "ts": begin}
        yield {**event, "dur": max(long, 0.0), "args": facts}


def _counters(merged: Merged, rank: int, start_s: float) -> Iterator[dict[str, Any]]:
    """Counts of each second, of this rank's clock: what they are off by is nothing to a second."""
    trace = merged.traces[rank]
    shift_s = 0.0
    if len(trace.records):
        shift_s = float(merged.records[rank]["begin_s"][0] - trace.records["begin_s"][0])
    for record in trace.counters:
        name = trace.names[record["name"]].removeprefix(COUNTER)
        at_us = round((float(record["begin_s"]) + shift_s - start_s) * 1e6, 3)
        yield {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": at_us, "args": {"value": int(record["value"])}}


def write_chrome(merged: Merged, path: Path) -> None:
    """Write the events as gzip'd JSON, one a line."""
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
"""What `--to` may say."""

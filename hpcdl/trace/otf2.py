"""A trace as an OTF2 archive, the format of Score-P, Vampir and Scalasca; written by OTF2's own library.

A folder with `traces.otf2` to open. Each rank is a location with the regions of its steps' parts, inside of a region
`step` that tells its number. What overlaps (buckets, messages, layers) cannot nest as regions must.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import PARTS
from hpcdl.core.errors import UsageError
from hpcdl.core.storage.disk import check_output, move, private_folder
from hpcdl.trace.merge import Merged

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

TICKS = 10**9
"""In a second."""
ARCHIVE = "traces"
STEP = "step"


def write_otf2(merged: Merged, path: Path) -> None:
    """Write the archive into the new folder `path`; UsageError where that is there, or the library is missing."""
    if importlib.util.find_spec("otf2") is None:
        raise UsageError(
            "--to otf2: its library is not installed; pip install 'hpcdl[otf2]', or use --to perfetto or --to chrome"
        )
    if path.exists():
        raise UsageError(f"cannot write {path}: --to otf2 makes a folder, and this is there; choose another name")
    check_output(path)
    with private_folder(".otf2-", path.absolute().parent) as folder:
        _write(merged, folder / ARCHIVE)
        move(folder / ARCHIVE, path)


def _write(merged: Merged, folder: Path) -> None:
    import otf2

    ranks = merged.ranks
    start_s = min((float(merged.records[rank]["begin_s"].min()) for rank in ranks), default=0.0)
    with otf2.writer.open(str(folder), archive_name=ARCHIVE, timer_resolution=TICKS) as archive:
        archive.creator = "hpcdl"
        known = archive.definitions
        regions = {name: known.region(name) for name in (STEP, *PARTS)}
        number = known.attribute(STEP, "number of the step", otf2.Type.INT64)
        machine = known.system_tree_node("machine", class_name="machine", parent=None)
        hosts: dict[str, Any] = {}
        first_ticks: list[int] = []
        for rank in sorted(merged.traces):
            trace = merged.traces[rank]
            if trace.host not in hosts:
                hosts[trace.host] = known.system_tree_node(trace.host, class_name="node", parent=machine)
            group = known.location_group(f"rank {rank} ({trace.role})", system_tree_parent=hosts[trace.host])
            writer = archive.event_writer(f"rank {rank}", group=group)
            events = _events(merged, rank, start_s)
            first_ticks += [ticks for ticks, *_ in events[:1]]
            for ticks, name, enters, step in events:
                if enters:
                    writer.enter(ticks, regions[name], attributes={number: step} if name == STEP else None)
                else:
                    writer.leave(ticks, regions[name])
        if first_ticks:
            # The library takes the time of writing for the time of the first event.
            archive._realtime_timestamp = _wall_s(merged, start_s + min(first_ticks) / TICKS)


def _wall_s(merged: Merged, time_s: float) -> float:
    """The wall clock, in Unix seconds, at `time_s` of rank 0's clock, as the first rank that has spans knows it."""
    rank = merged.ranks[0]
    trace = merged.traces[rank]
    own_s, common_s = float(trace.records["begin_s"].min()), float(merged.records[rank]["begin_s"].min())
    return trace.wall_s + own_s - trace.begin_s + time_s - common_s


def _events(merged: Merged, rank: int, start_s: float) -> list[tuple[int, str, bool, int]]:
    """Ticks since the first span, the region, whether it begins, and the step; in order, each inside of another."""
    found: list[tuple[int, str, bool, int]] = []
    columns = [merged.spans(rank, name) for name in PARTS]
    numbers = columns[0]["step"]
    for column in columns[1:]:
        numbers = numpy.intersect1d(numbers, column["step"])
    whole = [column[numpy.isin(column["step"], numbers)] for column in columns]
    before = 0
    for rows in zip(*whole, strict=True):
        borders_s = numpy.array([*(row["begin_s"] for row in rows), rows[-1]["end_s"]])
        ticks = numpy.maximum.accumulate(numpy.rint((borders_s - start_s) * TICKS).astype(numpy.int64))
        ticks = numpy.maximum(ticks, before)  # rounding must not let a step begin before the last has ended
        step, before = int(rows[0]["step"]), int(ticks[-1])
        found.append((int(ticks[0]), STEP, True, step))
        for name, begin, end in zip(PARTS, ticks[:-1].tolist(), ticks[1:].tolist(), strict=True):
            found += [(begin, name, True, step), (end, name, False, step)]
        found.append((before, STEP, False, step))
    return found

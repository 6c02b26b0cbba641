"""The file of a rank: a page of facts, then records of fixed size in a ring of memory-mapped chunks.

Written data are in the page cache at once: a killed process loses none of them. Disk space is allocated before it is
mapped, so that a full disk makes the ring smaller and never ends a run.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.clocks import ClockPoint
from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.core.storage.disk import open_new
from hpcdl.core.storage.files import open_regular

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

MAGIC, VERSION = b"HPCDLTRC", 1
RECORD = numpy.dtype(
    [
        ("begin_s", "<f8"),
        ("end_s", "<f8"),
        ("value", "<i8"),
        ("step", "<i4"),
        ("peer", "<i4"),
        ("bucket", "<i4"),
        ("thread", "<u2"),
        ("name", "<u2"),
    ]
)
"""A span, or a counter with two equal times. `value`: bytes, or the counter's value. -1: none. Name 0: no record.

For a layer's span the bucket is the index of the layer's name.
"""
POINT = numpy.dtype([("own_s", "<f8"), ("parent_s", "<f8"), ("error_s", "<f8")])
MOST_POINTS, MOST_NAMES, NAME_BYTES = 1024, 416, 96
"""Capacities of the first page; files of earlier versions have 256 names."""
FACTS = numpy.dtype(
    [
        ("magic", "S8"),
        ("version", "<i4"),
        ("rank", "<i4"),
        ("size", "<i4"),
        ("num_points", "<i4"),
        ("parent", "<i4"),
        ("num_names", "<i4"),
        ("begin_s", "<f8"),
        ("wall_s", "<f8"),
        ("cost_s", "<f8"),
        ("level", "S16"),
        ("role", "S16"),
        ("host", "S256"),
        ("points", POINT, (MOST_POINTS,)),
        ("names", f"S{NAME_BYTES}", (MOST_NAMES,)),
    ]
)
PAGE_BYTES = 1 << 16  # offsets of `mmap` are whole pages, of up to 64 KiB (arm64, ppc64le)
CHUNK = 8192
"""Records per chunk: 320 KiB, a multiple of every page size."""
_PACK = struct.Struct("<ddqiiiHH")  # RECORD's layout; numpy takes longer to assign one record
FAR_S = 1e11
"""A clock value of three thousand years is invalid."""
COUNTER = "counter: "
"""Prefix of the names of counters."""


class TraceFile:
    """The file of this rank while it runs. Any thread may write. `facts` is the mapped first page."""

    def __init__(self, path: Path, num_bytes: int, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._descriptor = open_new(path, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # shows that a process writes it
        # Writing to a mapped page without disk space ends a process by SIGBUS.
        os.posix_fallocate(self._descriptor, 0, PAGE_BYTES)
        self._page = mmap.mmap(self._descriptor, PAGE_BYTES)
        self.facts = numpy.frombuffer(self._page, FACTS, 1)
        for name, value in {**facts, "magic": MAGIC, "version": VERSION, "num_names": 1}.items():
            self.facts[name][0] = value.encode() if isinstance(value, str) else value
        self._chunks: list[mmap.mmap] = []
        self._capacity = max(1, (num_bytes - PAGE_BYTES) // (CHUNK * RECORD.itemsize)) * CHUNK
        self._sequence = itertools.count()
        self._growing = threading.Lock()
        self._names: dict[str, int] = {"": 0}
        self._threads: dict[int, int] = {}
        self.num_written = 0
        self._grow(0)

    def write(self, name: str, begin_s: float, end_s: float, value: int, step: int, peer: int, bucket: int) -> None:
        """Append a record. In a full file it replaces the oldest one."""
        code = self._names.get(name)
        if code is None:
            code = self.code(name)
        if not code and name:  # no room for its name
            return
        ident = threading.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads.setdefault(ident, min(len(self._threads), 0xFFFF))
        # `next` is atomic, so threads get different slots without a lock.
        self.num_written = number = next(self._sequence)
        slot = number % self._capacity
        chunk, row = divmod(slot, CHUNK)
        if chunk >= len(self._chunks) and not self._grow(chunk):
            slot = number % self._capacity
            chunk, row = divmod(slot, CHUNK)
        _PACK.pack_into(
            self._chunks[chunk], row * RECORD.itemsize, begin_s, end_s, value, step, peer, bucket, thread, code
        )

    def add_point(self, point: ClockPoint) -> None:
        """Keep a point of the clock. If there is no room left, it replaces the last one."""
        facts = self.facts[0]
        index = min(int(facts["num_points"]), MOST_POINTS - 1)
        facts["points"][index] = (point.own_s, point.parent_s, point.error_s)
        self.facts["parent"][0] = point.parent
        self.facts["num_points"][0] = index + 1  # last: a kill before this leaves a new point uncounted

    def cost_s(self) -> float:
        """Return the seconds per record, measured with unused ones: the trace states its own share of the time."""
        began = time.perf_counter()
        for _ in range(200):
            self.write("", 0.0, 0.0, 0, -1, -1, -1)
        return (time.perf_counter() - began) / 200

    def content(self) -> Iterator[bytes]:
        """Yield the page and the used records, piece by piece."""
        yield self._page[:]
        used = min(self.num_written + 1, len(self._chunks) * CHUNK) * RECORD.itemsize
        for chunk in self._chunks:
            yield chunk[: min(used, len(chunk))]
            used = max(0, used - len(chunk))

    def close(self) -> None:
        """Stop the growth of the file. Late threads still have memory to write to."""
        with self._growing:
            self._capacity = len(self._chunks) * CHUNK
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def code(self, name: str) -> int:
        """Return the index of `name` among the names; 0 if there is no room for another."""
        existing = self._names.get(name)
        if existing is not None:
            return existing
        with self._growing:
            if name not in self._names:
                code = len(self._names) if len(self._names) < MOST_NAMES else 0
                if code:
                    # The end of a long name is kept, because nested layers share its beginning.
                    self.facts["names"][0][code] = name.encode()[-NAME_BYTES:]
                    self.facts["num_names"][0] = code + 1  # after the name, for readers of a killed rank's file
                self._names[name] = code
            return self._names[name]

    def _grow(self, chunk: int) -> bool:
        """Map chunks up to `chunk`. Returns False if the ring ends before it, because the disk is full."""
        with self._growing:
            while len(self._chunks) <= chunk < self._capacity // CHUNK:
                start = PAGE_BYTES + len(self._chunks) * CHUNK * RECORD.itemsize
                try:
                    os.posix_fallocate(self._descriptor, start, CHUNK * RECORD.itemsize)
                    self._chunks.append(mmap.mmap(self._descriptor, CHUNK * RECORD.itemsize, offset=start))
                except OSError as error:
                    if not self._chunks:
                        raise HpcdlError(f"cannot write {self.path}: {error.strerror}") from error
                    self._capacity = len(self._chunks) * CHUNK
            return chunk < self._capacity // CHUNK


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """A rank's trace: `records` (RECORD) by start, without counters; `counters` by time.

    Their `name` is an index into `names`. Times are those of the rank's own clock.
    """

    path: Path
    rank: int
    size: int
    host: str
    role: str
    level: str
    parent: int
    begin_s: float
    wall_s: float
    cost_s: float
    points: Array
    names: tuple[str, ...]
    records: Array
    counters: Array

    def code(self, name: str) -> int:
        """Return the index of `name`, or an unused index if it never occurred."""
        return self.names.index(name) if name in self.names else len(self.names)

    def spans(self, name: str) -> Array:
        """Return the records with that name."""
        spans: Array = self.records[self.records["name"] == self.code(name)]
        return spans


def read_trace(path: Path) -> RankTrace:
    """Return the trace in `path`, also of a killed rank. Raises CorruptError if it is none or damaged."""
    try:
        with open_regular(path) as file:
            page = file.read(PAGE_BYTES)
            if len(page) < PAGE_BYTES or page[:8] != MAGIC:
                raise CorruptError(f"{path} is not a trace of a rank, or damaged")
            records = numpy.fromfile(file, RECORD)
    except OSError as error:
        raise CorruptError(f"cannot read {path}: {error.strerror}") from error
    facts = numpy.frombuffer(page, FACTS, 1)[0]
    if facts["version"] != VERSION:
        raise CorruptError(f"{path} is of version {facts['version']}; this hpcdl reads {VERSION}")
    num_names, num_points = int(facts["num_names"]), int(facts["num_points"])
    if not (1 <= num_names <= MOST_NAMES and 0 <= num_points <= MOST_POINTS and 0 <= facts["rank"] < facts["size"]):
        raise CorruptError(f"{path} is damaged: its first page makes no sense")
    points = facts["points"][:num_points].copy()
    times_s = [facts["begin_s"], facts["wall_s"], facts["cost_s"], *(points[field] for field in POINT.names or ())]
    advances = numpy.all(numpy.diff(points["own_s"]) > 0)
    if not (advances and all(numpy.all(numpy.abs(each) < FAR_S) for each in times_s)):  # comparisons with NaN are False
        raise CorruptError(f"{path} is damaged: its clock shows no time")
    names = tuple(bytes(name).decode(errors="replace") for name in facts["names"][:num_names])
    fine = (records["name"] > 0) & (records["name"] < num_names) & (records["end_s"] >= records["begin_s"])
    plausible = (numpy.abs(records["begin_s"]) < FAR_S) & (numpy.abs(records["end_s"]) < FAR_S)
    records = records[fine & plausible]
    records = records[numpy.argsort(records["begin_s"], kind="stable")]
    counting = numpy.array([name.startswith(COUNTER) for name in names])[records["name"]]
    texts = {key: bytes(facts[key]).decode(errors="replace") for key in ("host", "role", "level")}
    return RankTrace(
        path=path,
        rank=int(facts["rank"]),
        size=int(facts["size"]),
        host=texts["host"],
        role=texts["role"],
        level=texts["level"],
        parent=int(facts["parent"]),
        begin_s=float(facts["begin_s"]),
        wall_s=float(facts["wall_s"]),
        cost_s=float(facts["cost_s"]),
        points=points,
        names=names,
        records=records[~counting],
        counters=records[counting],
    )

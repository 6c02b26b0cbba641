"""Writes the shards of a job: picks a shard's samples, reads them from the source, puts them into the file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdl.core.files import replacing
from hpcdl.data.dataset import UNSPLIT
from hpcdl.data.format.hdf5 import ShardFrame, filters
from hpcdl.data.format.manifest import ShardEntry
from hpcdl.data.format.shard_file import NewShard
from hpcdl.data.read.order import mixed, permuted
from hpcdl.data.read.prefetch import aligned_empty
from hpcdl.data.sources.base import Source, SourceChanged, UnreadableSample
from hpcdl.data.write.images import check_encoded, decode
from hpcdl.data.write.index import Index, Rows
from hpcdl.data.write.plan import ShardJob, shard_file

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """A written shard (None where not one of its samples can be read), and the samples left out."""

    split: str
    number: int
    entry: ShardEntry | None
    skipped: list[str] = field(default_factory=list)


class _NothingReadable(Exception):
    """Not one sample of a shard can be read."""


class ShardWriter:
    """Writes the shards of a job, any of them, in any order, in any process."""

    def __init__(self, target: Path, job: ShardJob, source: Source, index: Index) -> None:
        self._target, self._job, self._source, self._index = target, job, source, index

    def write(self, split: str, number: int, told: Callable[[int], None] = lambda _: None) -> ShardResult:
        """Write a shard: to a temporary name, fsynced, renamed. `told` hears of samples as they are done."""
        result, settle = self.begin(split, number, told)
        settle()
        return result

    def begin(
        self, split: str, number: int, told: Callable[[int], None] = lambda _: None
    ) -> tuple[ShardResult, Callable[[], None]]:
        """Write a shard to a temporary name; what is returned with it makes it durable and gives it its name.

        That may happen in another thread, while the next shard is being written.
        """
        job = self._job
        rows = self._rows(split, number)
        path = self._target / shard_file(split, number, UNSPLIT)
        with contextlib.suppress(_NothingReadable), contextlib.ExitStack() as unsettled:
            temporary = unsettled.enter_context(replacing(path))
            skipped, checksum, rows = self._write_readable(temporary, split, number, rows, told)
            entry = ShardEntry(
                file=shard_file(split, number, UNSPLIT),
                num_samples=len(rows),
                num_bytes=temporary.stat().st_size,
                frame_checksum=checksum,
            )
            result = ShardResult(split=split, number=number, entry=entry, skipped=skipped)
            return result, unsettled.pop_all().close
        skipped = [self._source.describe(row, job.facts, self._index) for row in rows]
        return ShardResult(split=split, number=number, entry=None, skipped=skipped), lambda: None

    def _write_readable(
        self, path: Path, split: str, number: int, rows: Rows, told: Callable[[int], None]
    ) -> tuple[list[str], str, Rows]:
        """Write what can be read of `rows`: the names of the others, the frame's checksum, the rows written."""
        bad, checksum = self._try(path, split, number, rows, told)
        skipped = [self._source.describe(rows[at], self._job.facts, self._index) for at in bad]
        if not bad:
            return skipped, checksum, rows
        rows = np.delete(rows, bad)
        path.unlink()
        if not len(rows):
            raise _NothingReadable
        bad, checksum = self._try(path, split, number, rows, lambda _: None)
        if bad:
            raise SourceChanged(f"samples that could be read a moment ago cannot any more, near {skipped[0]}")
        return skipped, checksum, rows

    def close(self) -> None:
        """Close the list of samples."""
        self._index.close()

    def _rows(self, split: str, number: int) -> Rows:
        job = self._job
        first, stop = job.plan.shard_samples(split, number)
        key = mixed(job.seed, 21, xxhash.xxh3_64_intdigest(split.encode()))
        places = permuted(np.arange(first, stop, dtype=np.int64), job.plan.num_samples[split], key)
        if not job.members:
            return self._index.rows(split, places)
        return self._index.rows(UNSPLIT, self._index.numbers(split, places))

    def _try(
        self, path: Path, split: str, number: int, rows: Rows, told: Callable[[int], None]
    ) -> tuple[list[int], str]:
        """Write `rows` to `path`: the places of those that cannot be read (then `path` is of no use), the checksum."""
        job = self._job
        encoded = job.encoding == "encoded"
        frame = ShardFrame(
            num_samples=len(rows),
            data_name="bytes" if encoded else "images",
            data_shape=(int(rows["size"].sum()),) if encoded else (len(rows), *job.sample_shape),
            dtype="uint8" if encoded else job.dtype,
            block_samples=job.plan.block_samples,
            attributes=job.attributes(split, number),
            class_names=tuple(job.facts.class_names),
            alignment=job.plan.alignment,
            filters=filters(job.compression),
            sample_checksums=job.sample_checksums,
        )
        sizes = (
            rows["size"].tolist()
            if encoded
            else [int(np.prod(job.sample_shape)) * np.dtype(job.dtype).itemsize] * len(rows)
        )
        bad: list[int] = []
        with NewShard(path, frame) as shard:
            for first, block in (self._encoded_blocks if encoded else self._raw_blocks)(rows, bad):
                if not bad:
                    shard.write_block(first, block, sizes[first : first + job.plan.block_samples])
                told(min(job.plan.block_samples, len(rows) - first))
            offsets = np.concatenate([[0], np.cumsum(rows["size"])]) if encoded else None
            return bad, "" if bad else shard.finish(rows["label"], offsets)

    def _raw_blocks(self, rows: Rows, bad: list[int]) -> Iterator[tuple[int, Array]]:
        job = self._job
        step = job.plan.block_samples
        buffer = aligned_empty((min(step, len(rows)), *job.sample_shape), job.dtype)
        for first in range(0, len(rows), step):
            chosen = rows[first : first + step]
            for at, row in enumerate(chosen):
                try:
                    self._read_pixels(row, buffer[at])
                except UnreadableSample as error:
                    self._refuse(error, row, first + at, bad)
            yield first, buffer[: len(chosen)]

    def _encoded_blocks(self, rows: Rows, bad: list[int]) -> Iterator[tuple[int, Array]]:
        step = self._job.plan.block_samples
        sizes = np.add.reduceat(rows["size"], np.arange(0, len(rows), step))
        buffer = np.empty(int(sizes.max()), np.uint8)
        for first, size in zip(range(0, len(rows), step), sizes.tolist(), strict=True):
            end = 0
            for at, row in enumerate(rows[first : first + step]):
                try:
                    content = self._source.read(row, self._job.facts, self._index)
                    assert not isinstance(content, np.ndarray)
                    check_encoded(content)
                    buffer.data[end : end + len(content)] = content
                    end += len(content)
                except UnreadableSample as error:
                    self._refuse(error, row, first + at, bad)
            yield first, buffer[:size]

    def _read_pixels(self, row: Any, out: Array) -> None:
        job = self._job
        content = self._source.read(row, job.facts, self._index)
        if not isinstance(content, np.ndarray):
            size = (job.image_size[0], job.image_size[1]) if job.image_size else None
            content = decode(content, size=size, channels=job.sample_shape[2])
        if content.shape != out.shape:
            raise UnreadableSample(
                f"its size is {content.shape[0]}x{content.shape[1]}, the first one's {out.shape[0]}x{out.shape[1]}; "
                f"give --image-size {out.shape[0]}x{out.shape[1]}"
            )
        out[...] = content

    def _refuse(self, error: UnreadableSample, row: Any, at: int, bad: list[int]) -> None:
        if self._job.on_error == "stop":
            name = self._source.describe(row, self._job.facts, self._index)
            text = str(error) if name in str(error) else f"{name}: {error}"
            raise UnreadableSample(f"{text} (--on-error skip leaves such samples out)") from error
        bad.append(at)

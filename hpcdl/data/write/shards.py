"""Write the shards of a job: choose a shard's samples, read them from the source, write them to the file.

Means, deviations and ranges of fields are combined from block to block and from shard to shard in a fixed order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdl.core.storage.disk import replacing
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import Field, ShardEntry, Statistics
from hpcdl.data.format.order import mixed, permuted
from hpcdl.data.format.prefetch import aligned_empty
from hpcdl.data.format.shard_file import NewShard
from hpcdl.data.sources.base.source import (
    Content,
    FieldsReader,
    Index,
    NotFinite,
    Rows,
    Source,
    SourceChanged,
    UnreadableSample,
)
from hpcdl.data.sources.layouts.images import check_encoded, decode
from hpcdl.data.write.plan import ShardJob, shard_file

_MOST_CHANNELS = 16


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Moments of `count` values: mean, sum of squared deviations from it, smallest and largest value."""

    count: int = 0
    mean: Sequence[float] = ()
    squares: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @staticmethod
    def of(values: npt.NDArray[np.generic], field: Field) -> Moments:
        """Return the moments of a block (samples first) of the field `field`, per channel; omit rows not finite."""
        columns = values.reshape(-1, _channels(field)).astype(np.float64)
        if not np.isfinite(columns).all():
            columns = columns[np.isfinite(columns).all(1)]
        if not len(columns):
            return Moments()
        mean = columns.mean(0)
        return Moments(
            count=len(columns),
            mean=mean.tolist(),
            # About the mean: a difference of two large sums would lose digits.
            squares=np.square(columns - mean).sum(0).tolist(),
            low=columns.min(0).tolist(),
            high=columns.max(0).tolist(),
        )

    def joined(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan, Golub and LeVeque 1983)."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        own_mean, other_mean = np.array(self.mean), np.array(other.mean)
        step = other_mean - own_mean
        squares = np.array(self.squares) + np.array(other.squares) + step**2 * (self.count * other.count / count)
        return Moments(
            count=count,
            mean=(own_mean + step * (other.count / count)).tolist(),
            squares=squares.tolist(),
            low=np.minimum(self.low, other.low).tolist(),
            high=np.maximum(self.high, other.high).tolist(),
        )

    def statistics(self) -> Statistics:
        """Return the statistics that the manifest stores."""
        deviation = np.sqrt(np.array(self.squares) / max(1, self.count))
        return Statistics(mean=self.mean, std=deviation.tolist(), low=self.low, high=self.high)


def _channels(field: Field) -> int:
    """Return the number of last-axis elements that are scaled separately: features or channels; 1 if they are not."""
    channels_last = len(field.shape) < 3 or field.shape[-1] <= _MOST_CHANNELS
    return field.shape[-1] if field.shape and channels_last and not (field.variable and len(field.shape) == 1) else 1


def scaled(fields: Sequence[Field], shards: Iterable[Sequence[Moments]]) -> list[Field]:
    """Return `fields` with the statistics combined from the moments of all shards."""
    scaled_names = [field.name for field in fields if field.normalise != "none"]
    totals = {name: Moments() for name in scaled_names}
    for moments in shards:
        for name, field_moments in zip(scaled_names, moments, strict=False):  # a shard without samples has none
            totals[name] = totals[name].joined(field_moments)
    return [
        dataclasses.replace(field, statistics=totals[field.name].statistics()) if field.name in totals else field
        for field in fields
    ]


Array = npt.NDArray[Any]
_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """A written shard (None if none of its samples can be read), and the samples skipped."""

    split: str
    number: int
    entry: ShardEntry | None
    skipped: list[str] = field(default_factory=list)
    moments: Sequence[Moments] = ()
    """The moments of each field that is to be scaled, in the order of the fields."""


class _NothingReadable(Exception):
    """None of a shard's samples can be read."""


class ShardWriter:
    """Writes any shards of a job, in any order, in any process."""

    def __init__(self, target: Path, job: ShardJob, source: Source, index: Index) -> None:
        self._target, self._job, self._source, self._index = target, job, source, index

    def write(self, split: str, number: int, on_samples: Callable[[int], None] = lambda _: None) -> ShardResult:
        """Write a shard to a temporary name, fsync, rename. `on_samples` gets the number of samples of each block."""
        result, settle = self.begin(split, number, on_samples)
        settle()
        return result

    def begin(
        self, split: str, number: int, on_samples: Callable[[int], None] = lambda _: None
    ) -> tuple[ShardResult, Callable[[], None]]:
        """Write a shard to a temporary name; the function returned with it makes it durable and renames it.

        That function may run in another thread while the next shard is written.
        """
        job = self._job
        rows = self._rows(split, number)
        path = self._target / shard_file(split, number, UNSPLIT)
        # By this error the stack is left, and the temporary file removed.
        with contextlib.suppress(_NothingReadable), contextlib.ExitStack() as unsettled:
            temporary = unsettled.enter_context(replacing(path))
            skipped, checksum, rows, moments = self._write_readable(temporary, split, number, rows, on_samples)
            entry = ShardEntry(
                file=shard_file(split, number, UNSPLIT),
                num_samples=len(rows),
                num_bytes=temporary.stat().st_size,
                frame_checksum=checksum,
            )
            result = ShardResult(split=split, number=number, entry=entry, skipped=skipped, moments=moments)
            # Closing `replacing` is what fsyncs and renames; until then the shard does not exist.
            return result, unsettled.pop_all().close
        skipped = [self._source.describe(row, job.facts, self._index) for row in rows]
        return ShardResult(split=split, number=number, entry=None, skipped=skipped), lambda: None

    def _write_readable(
        self, path: Path, split: str, number: int, rows: Rows, on_samples: Callable[[int], None]
    ) -> tuple[list[str], str, Rows, list[Moments]]:
        """Write the readable `rows`; return the names of unreadable ones, frame checksum, rows written, and moments."""
        bad, checksum, moments = self._try(path, split, number, rows, on_samples)
        skipped = [self._source.describe(rows[row_number], self._job.facts, self._index) for row_number in bad]
        if not bad:
            return skipped, checksum, rows, moments
        rows = np.delete(rows, bad)
        if not len(rows):
            raise _NothingReadable
        # From the start: all offsets depend on the number of rows. Progress has been counted already.
        bad, checksum, moments = self._try(path, split, number, rows, lambda _: None)
        if bad:
            raise SourceChanged(f"samples that could be read a moment ago cannot any more, near {skipped[0]}")
        return skipped, checksum, rows, moments

    def close(self) -> None:
        """Close the list of samples."""
        self._index.close()

    def _rows(self, split: str, number: int) -> Rows:
        job = self._job
        first, stop = job.plan.shard_samples(split, number)
        # A hash that is the same in every process, as Python's own is not.
        key = mixed(job.seed, 21, xxhash.xxh3_64_intdigest(split.encode()))
        positions = np.arange(first, stop, dtype=np.int64)
        for begin in range(0, len(positions), _AT_ONCE):  # the permutation takes ten times the memory of its result
            piece = slice(begin, begin + _AT_ONCE)
            positions[piece] = permuted(positions[piece], job.plan.num_samples[split], key)
        if not job.members:
            return self._index.rows(split, positions)
        return self._index.rows(UNSPLIT, self._index.numbers(split, positions))

    def _try(
        self, path: Path, split: str, number: int, rows: Rows, on_samples: Callable[[int], None]
    ) -> tuple[list[int], str, list[Moments]]:
        """Write `rows` to `path`; return the indices of unreadable rows, the checksum, and moments of scaled fields.

        If a row is unreadable, the file at `path` is useless.
        """
        job, count, step = self._job, len(rows), self._job.plan.block_samples
        lengths = {
            field.name: self._lengths(rows, number_of_field)
            for number_of_field, field in enumerate(job.fields)
            if field.ragged
        }
        frame = job.frame(
            split, number, count, {name: int(sizes_of_field.sum()) for name, sizes_of_field in lengths.items()}
        )
        bad: list[int] = []
        moments = {field.name: Moments() for field in job.fields if field.normalise != "none"}
        small = {
            field.name: np.empty((count, *field.shape), field.stored_type) for field in job.fields if field.resident
        }
        with NewShard(path, frame) as shard:
            for first in range(0, count, step):
                of_block = slice(first, first + step)
                sizes = {name: sizes_of_field[of_block] for name, sizes_of_field in lengths.items()}
                block = self._block(rows[of_block], sizes, first, bad)
                # With one unreadable sample the file is written again; the rest is read to find the others.
                for field, values in zip(job.fields, block if not bad else [], strict=not bad):
                    if field.name in moments:
                        moments[field.name] = moments[field.name].joined(Moments.of(values, field))
                    if field.resident:
                        small[field.name][of_block] = values
                        continue
                    sizes_of_field = sizes[field.name] if field.ragged else np.ones(len(values), np.int64)
                    shard.write_block(field.name, first, values, (sizes_of_field * field.row_bytes).tolist())
                on_samples(min(step, count - first))
            offsets = {
                name: np.concatenate([[0], np.cumsum(sizes_of_field)]) for name, sizes_of_field in lengths.items()
            }
            return bad, "" if bad else shard.finish(small, offsets), list(moments.values())

    def _lengths(self, rows: Rows, number: int) -> Array:
        """Return the lengths of the samples of field `number`: along the first axis, or in bytes."""
        sizes: Array = rows["size"]
        return sizes if self._job.pictures else self._fields_reader.lengths(rows, number, self._job.facts)

    def _block(self, rows: Rows, sizes: Mapping[str, Array], first: int, bad: list[int]) -> list[Array]:
        """Return the fields of a block of samples, the first being `first` of the shard; valid until the next block.

        Ragged fields, of lengths `sizes`, are stored one after another. The indices of unreadable samples are added to
        `bad`.
        """
        at_once = self._read_at_once(rows)
        if at_once is not None:
            return at_once
        fields = self._job.fields
        block_values = [
            np.empty((int(sizes[item.name].sum()), *item.row_shape), item.stored_type)
            if item.ragged
            else self._buffers[item.name][: len(rows)]
            for item in fields
        ]
        ends = [0] * len(fields)
        for row_number, row in enumerate(rows):
            try:
                sample = self._sample(row)
            except UnreadableSample as error:
                self._refuse(error, row, first + row_number, bad)
                continue
            for number, (item, values) in enumerate(zip(fields, sample, strict=True)):
                if item.ragged:
                    begin, ends[number] = ends[number], ends[number] + len(values)
                    block_values[number][begin : ends[number]] = values
                else:
                    block_values[number][row_number] = np.reshape(values, item.shape)
        return block_values

    @functools.cached_property
    def _buffers(self) -> Mapping[str, Array]:
        """Buffers for one block of each field whose samples have a fixed shape."""
        block, fields = self._job.plan.block_samples, self._job.fields
        return {
            field.name: aligned_empty((block, *field.shape), field.stored_type) for field in fields if not field.ragged
        }

    @property
    def _fields_reader(self) -> FieldsReader:
        return cast(FieldsReader, self._source)

    def _read_at_once(self, rows: Rows) -> list[Array] | None:
        """Return the fields of a block if the source has arrays: a sample then costs one system call and one copy."""
        job, read = self._job, getattr(self._source, "read_fields_block", None)
        if read is None or job.facts.decodes or job.encoding == "encoded":
            return None
        values: list[Array] = read(rows, job.facts, [field.stored_type for field in job.fields]) or []
        # If some images are not finite, they are read one by one to find out which.
        return values if values and not (job.pictures and self._not_finite(values)) else None

    def _sample(self, row: Any) -> Sequence[Any]:
        """Return the fields of a sample; UnreadableSample if it cannot be read."""
        job = self._job
        if job.pictures:
            content = self._source.read(row, job.facts, self._index)
            return [self._file(content) if job.encoding == "encoded" else self._pixels(content), row["label"]]
        sample = self._fields_reader.read_fields(row, job.facts)
        if job.facts.decodes and self._not_finite(sample):  # listing has checked other fields
            raise NotFinite
        return sample

    def _file(self, content: Content | Array) -> Array:
        assert not isinstance(content, np.ndarray)
        # With `--on-error skip`, the shards must contain only images that decode.
        check_encoded(content, decodes=self._job.on_error == "skip")
        return np.frombuffer(content, np.uint8)

    def _pixels(self, content: Content | Array) -> Array:
        job = self._job
        if not isinstance(content, np.ndarray):
            size = (job.image_size[0], job.image_size[1]) if job.image_size else None
            channels_given = job.options.get("channels") is not None
            content = decode(content, size=size, channels=job.sample_shape[2], dtype=job.dtype, asked=channels_given)
        height, width = job.sample_shape[:2]
        if content.shape != tuple(job.sample_shape):
            raise UnreadableSample(
                f"its size is {content.shape[0]}x{content.shape[1]}, the first one's {height}x{width}; "
                f"give --image-size {height}x{width}"
            )
        pixels = np.asarray(content, job.dtype)
        if self._not_finite([pixels]):
            raise NotFinite
        return pixels

    def _not_finite(self, values: Sequence[Array]) -> bool:
        """Return whether there is NaN or infinity, unless such values are kept."""
        floats = (array for array in values if array.dtype.kind == "f")
        return self._job.spec.nan != "keep" and not all(np.isfinite(array).all() for array in floats)

    def _refuse(self, error: UnreadableSample, row: Any, at: int, bad: list[int]) -> None:
        if self._job.on_error == "stop" and not (isinstance(error, NotFinite) and self._job.spec.nan == "skip"):
            name = self._source.describe(row, self._job.facts, self._index)
            text = str(error) if name in str(error) else f"{name}: {error}"
            advice = "" if isinstance(error, NotFinite) else " (--on-error skip leaves such samples out)"
            raise UnreadableSample(f"{text}{advice}") from error
        bad.append(at)

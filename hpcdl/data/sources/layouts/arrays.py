"""Samples that are rows of arrays, of any number, type and shape: list, check and read them.

A format only finds its arrays (`ArrayGroup` in placed.py). All else is common to all formats: which arrays are inputs
and targets (chosen.py), what one sample is (samples.py), which targets are classes (targets.py), and the rest here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import SourceError
from hpcdl.core.units import counted
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import DTYPES, Field
from hpcdl.data.sources.base.chosen import choose, divided, has_no_target, remarks_on_unused
from hpcdl.data.sources.base.glance import is_image_head
from hpcdl.data.sources.base.labels import (
    CLASS_LISTS,
    misread,
)
from hpcdl.data.sources.base.names import names_group
from hpcdl.data.sources.base.placed import STRINGS, ArrayGroup, PlacedArray
from hpcdl.data.sources.base.source import Array, ArrayLocation, Content, Index, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import leaves_out_split, some
from hpcdl.data.sources.base.values import (
    ABSENT,
)
from hpcdl.data.sources.checks.groups import remark_on_groups
from hpcdl.data.sources.checks.numbers import as_fed, bytes_swapped, doubts, never_written, unscaled
from hpcdl.data.sources.checks.pairing import ask_of_order, copies_of_targets, one_of_all
from hpcdl.data.sources.checks.pictures import Palettes, ask_of_files
from hpcdl.data.sources.layouts.flat import MOST_ARRAY_BYTES, FlatFiles, add_numbered, stamp_of
from hpcdl.data.sources.layouts.samples import Placed, check_counts, samples_of
from hpcdl.data.sources.layouts.targets import Target

_FILES_SEEN, _HEAD_BYTES = 8, 16
"""Samples whose first bytes are looked at: all of them begin like image files if they are such."""


_TEXTS_SEEN = 1000


class FieldSource:
    """Lists and reads samples whose arrays a format has found."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._location, self._work = Path(spec.location), Path(spec.work)
        self.inputs, self.targets = spec.inputs, spec.targets
        self.named: set[str] = set()
        """Arrays, columns and splits of the source, including those left out."""
        self.masks: set[str] = set()
        """Arrays that are targets: their pictures keep the numbers of the files."""
        self.compares_columns = False
        """Whether copies of a target are found by their columns' names, elsewhere."""
        self._readers: list[FlatFiles] = []
        self._starts: dict[str, npt.NDArray[np.int64]] = {}

    def list_parts(self, parts: Sequence[ArrayGroup], index: IndexWriter) -> SourceFacts:
        """List the samples of `parts`; SourceError says what is wrong with them, and which flag helps."""
        remarks: list[str] = []
        self.named.update(path for part in parts for path in part.arrays)
        parts = self.divided(parts, remarks)
        # Stage 1: which arrays are fields. Every split that is kept has every field below.
        left_out = [part.split for part in parts if leaves_out_split(part.split, self._spec.leave_out)]
        parts = [part for part in parts if part.split not in left_out]
        wanted = self._wanted(parts)
        placed = self._placed_parts(parts, [path for _, _, path in wanted], remarks)
        # Stage 2: one type and shape over all splits; classes become numbers.
        settled = [
            self._settled(name, role, path, per_part, remarks)
            for (role, name, path), (_, per_part) in zip(wanted, placed, strict=True)
        ]
        fields, arrays = [made for made, _ in settled], [per_part for _, per_part in settled]
        remarks += self._remarks_on_numbers(fields, arrays, [part.split for part in parts])
        if has_no_target(self.targets, self.named):
            name = _free("row", fields)
            fields.append(Field(name=name, role="target", dtype="int64"))
            arrays.append(self._row_numbers([part.split for part in parts], arrays[0]))
            remarks.append(f"no target: {name} has the number of each sample in the source, from 0 in each split")
        # Stage 3: the list. Rows are those samples that every field can give.
        columns = list(zip(*arrays, strict=True))
        labels = [number for number, item in enumerate(fields) if item.role == "target" and item.kind == "class"]
        kept = [self._finite(part, fields, column, remarks) for part, column in zip(parts, columns, strict=True)]
        for number, (part, column, rows) in enumerate(zip(parts, columns, kept, strict=True)):
            classes = column[labels[0]].chunks() if len(labels) == 1 else _zeros(column[0].num_samples)
            _list(index, part.split, number, classes, rows)
        flat = [array for column in columns for array in column]
        return SourceFacts(
            class_names=fields[labels[0]].class_names if len(labels) == 1 else ["all"],
            samples_are="fields",
            sample_shape=fields[0].shape,
            dtype=fields[0].dtype,
            stamps=[stamp_of(array.path) for array in flat],
            fields=fields,
            arrays=[_location(array) for array in flat],
            remarks=[*remarks, *(f"left out: the split {name}" for name in left_out)],
            skipped=[name for column in columns for name in _unreadable(column).values()],
            left_out=left_out,
        )

    def _wanted(self, parts: Sequence[ArrayGroup]) -> list[tuple[str, str, str]]:
        """Return role, name and path of each field; SourceError if there are none, or if a split lacks one."""
        if not parts or not parts[0].arrays:
            raise SourceError(f"{self._location} holds no arrays of numbers or text; check it, or --format")
        chosen = choose(parts[0].arrays, self.inputs, self.targets, str(self._location))
        # Before any array is placed: pictures of targets keep the numbers of their files.
        self.masks = {*chosen.targets.values()}
        wanted = [("input", *item) for item in chosen.inputs.items()]
        wanted += [("target", *item) for item in chosen.targets.items()]
        for _, _, path in wanted:
            if missing := next((part for part in parts if path not in part.arrays), None):
                if missing.split == UNSPLIT:
                    raise SourceError(
                        f"{self._location}: a file has no {path}, but {some(missing.arrays)}; name arrays alike in all "
                        "files, or give --leave-out FILE"
                    )
                raise SourceError(
                    f"{self._location}: the split {missing.split} has no {path}; every split needs every field"
                )
        return wanted

    def _placed_parts(self, parts: Sequence[ArrayGroup], paths: Sequence[str], remarks: list[str]) -> Placed:
        """Return the arrays of `paths`, as many samples in each of a part's; remarks are added on these and others."""
        placed = [(path, [part.arrays[path].place() for part in parts]) for path in paths]
        remarks += [line for _, per_part in placed for line in _remarks_of(per_part)]
        remarks += [f"{path}: {line}" for path, per_part in placed for line in _other_palettes(per_part)]
        remarks += [f"{path}: {line}" for path, per_part in placed for line in _packed_in_part(per_part)]
        unused = [path for path in parts[0].arrays if path not in paths]
        if any(array.called for path, per_part in placed for array in per_part if path in self.masks):
            unused = [path for path in unused if path.rpartition("/")[2].lower() not in CLASS_LISTS]
        remarks += remarks_on_unused(unused, self._spec)
        remarks += self._remarks_on_groups(parts, paths)
        placed = samples_of(len(parts), placed, self._spec, remarks)  # first: a file of one sample has other counts
        check_counts(parts, placed, self._spec)
        for number, part in enumerate(parts):
            places = {path: found.place for path, found in part.arrays.items()}
            ask_of_order(places, paths, self._spec, self.named)
            remarks += filter(None, [never_written(part.split, [per_part[number] for _, per_part in placed])])
        return placed

    def read(self, row: Any, facts: SourceFacts, index: Index) -> Content | Array:
        """Return an image file stored inside one of the source's files, for formats that support this."""
        self._readers = self._readers or [FlatFiles()]
        number = int(row["file"])
        return self._readers[0].read(facts.files[number], facts.stamps[number], int(row["place"]), int(row["size"]))

    def read_fields(self, row: Any, facts: SourceFacts) -> Sequence[Array]:
        """Return the fields of the sample of a row, valid until the next read."""
        count = len(facts.fields)
        self._readers = self._readers or [FlatFiles() for _ in range(count)]
        part, sample = int(row["file"]), int(row["place"])
        values: list[Array] = []
        for number, reader in enumerate(self._readers):
            at = part * count + number
            stored = facts.arrays[at]
            dtype = np.dtype(stored.dtype)
            first, length = sample, 1
            if stored.offsets:
                starts = self._starts_of(stored.offsets)
                first, length = int(starts[sample]), int(starts[sample + 1] - starts[sample])
            size = int(np.prod(stored.shape)) * dtype.itemsize
            content = reader.read(stored.file, facts.stamps[at], stored.offset + first * size, length * size)
            values.append(
                np.frombuffer(content, dtype).reshape((length, *stored.shape) if stored.offsets else stored.shape)
            )
        return values

    def read_fields_block(self, rows: Any, facts: SourceFacts, dtypes: Sequence[str]) -> list[Array] | None:
        """Return the fields of all samples of `rows` at once, as `dtypes`; None if they must be read one by one."""
        if not facts.fields:
            return None
        count, part = len(facts.fields), int(rows[0]["file"])
        places = facts.arrays[part * count : (part + 1) * count]
        alike = all(np.dtype(stored.dtype) == np.dtype(dtype) for stored, dtype in zip(places, dtypes, strict=False))
        if (
            len(places) != count
            or not alike
            or any(stored.offsets for stored in places)
            # Samples of a shuffled block may come from several parts.
            or (rows["file"] != part).any()
        ):
            return None
        self._readers = self._readers or [FlatFiles() for _ in range(count)]
        blocks = []
        for number, (stored, reader) in enumerate(zip(places, self._readers, strict=True)):
            out = np.empty((len(rows), *stored.shape), stored.dtype)
            if not reader.read_rows(
                stored.file, facts.stamps[part * count + number], stored.offset, rows["place"], out
            ):
                return None
            blocks.append(out)
        return blocks

    def lengths(self, rows: Any, number: int, facts: SourceFacts) -> Array:
        """Return the length of field `number` of each row's sample along its first axis."""
        result = np.empty(len(rows), np.int64)
        for at, row in enumerate(rows):
            stored = facts.arrays[int(row["file"]) * len(facts.fields) + number]
            starts = self._starts_of(stored.offsets)
            result[at] = starts[int(row["place"]) + 1] - starts[int(row["place"])]
        return result

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the number of the sample, and its file; for an image file its position."""
        if not facts.fields:
            return self.describe_picture(int(row["place"]), facts.files[int(row["file"])])
        stored = facts.arrays[int(row["file"]) * len(facts.fields)] if facts.arrays else None
        return f"sample {int(row['place'])}" + (f" of {Path(stored.file).name}" if stored else "")

    def describe_picture(self, index: int, file: str) -> str:
        """Return the name for messages of an image file stored in one of the source's files."""
        return f"image at byte {index} of {Path(file).name}"

    def placed(self, values: Array, offsets: Array | None = None, *, text: bool = False) -> PlacedArray:
        """Store an array made from the source in the work folder."""
        path = self._work / f"array{len(list(self._work.glob('array*')))}"
        np.ascontiguousarray(values).tofile(path)
        starts = None
        if offsets is not None:
            starts = path.with_name(f"{path.name}.offsets")
            offsets.astype(np.int64).tofile(starts)
        return PlacedArray(path=path, shape=values.shape, dtype=values.dtype, offsets=starts, text=text)

    def written(self, chunks: Iterable[Array]) -> PlacedArray:
        """Write chunks of one type and row shape, one after another, to a file of the work folder."""
        path = self._work / f"array{len(list(self._work.glob('array*')))}"
        count, shape, dtype = 0, tuple[int, ...](), np.dtype(np.float32)
        with path.open("wb") as file:
            for chunk in chunks:
                count, shape, dtype = count + len(chunk), chunk.shape[1:], chunk.dtype
                file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
        return PlacedArray(path=path, shape=(count, *shape), dtype=dtype)

    def placed_text(self, strings: Sequence[bytes | str], path: str) -> PlacedArray:
        """Store the strings of the array at `path` in the work folder; SourceError if they are not UTF-8."""
        encoded: list[bytes] = []
        for number, string in enumerate(strings):
            try:
                encoded.append(string.encode() if isinstance(string, str) else string)
                encoded[-1].decode()
            except UnicodeError as error:
                raise SourceError(
                    f"{self._location}: {path} of sample {number} is not UTF-8; save text as UTF-8, or bytes as uint8"
                ) from error
        return self._placed_strings(encoded)

    def _placed_strings(self, strings: Sequence[bytes]) -> PlacedArray:
        offsets = np.concatenate([[0], np.cumsum([len(string) for string in strings], dtype=np.int64)])
        return self.placed(np.frombuffer(b"".join(strings), np.uint8), offsets, text=True)

    def divided(self, parts: Sequence[ArrayGroup], remarks: list[str]) -> list[ArrayGroup]:
        """Divide `parts` by the splits in their arrays' names; unused arrays are added to `remarks`."""
        return divided(parts, self._spec, [*self.inputs, *self.targets], remarks)

    def not_finite(self, field: Field, array: PlacedArray) -> Array:
        """Return whether a value of each sample is NaN or infinity."""
        bad_chunks = [~np.isfinite(chunk).reshape(len(chunk), -1).all(1) for chunk in array.chunks()]
        lines = np.concatenate([np.zeros(0, np.bool_), *bad_chunks])
        if array.offsets is None:
            return lines
        starts = array.starts
        # Differences of running counts: a sample of many rows is bad if one of them is.
        before = np.concatenate([[0], np.cumsum(lines)])
        holds: Array = before[starts[1:]] > before[starts[:-1]]
        return holds

    def as_fed(self, field: Field, arrays: Sequence[PlacedArray]) -> str:
        """Describe how training changes a field's numbers; empty if it does not."""
        return as_fed(field, arrays, normalised=self._spec.normalised)

    def _remarks_on_numbers(
        self, fields: Sequence[Field], arrays: Sequence[Sequence[PlacedArray]], splits: Sequence[str]
    ) -> list[str]:
        lines: list[str] = []
        for item, own in zip(fields, arrays, strict=True):
            scales = "" if self._spec.normalised and item.role == "input" else unscaled(item, own)
            lines += filter(None, [self.as_fed(item, own), scales, *doubts(item, own, splits)])
        lines += filter(None, [one_of_all(fields, [own[0] for own in arrays]) if len(splits) == 1 else ""])
        return lines + ([] if self.compares_columns else copies_of_targets(fields, [own[0] for own in arrays]))

    def _starts_of(self, name: str) -> npt.NDArray[np.int64]:
        if name not in self._starts:
            self._starts[name] = np.fromfile(name, np.int64)
        return self._starts[name]

    def _remarks_on_groups(self, parts: Sequence[ArrayGroup], used: Container[str]) -> list[str]:
        """Return a remark if samples of one patient, or what else an array beside the used ones names, are divided."""
        name = next((path for path in parts[0].arrays if names_group(path) and path not in used), None)
        if name is None or len({part.split for part in parts}) < 2 or any(name not in part.arrays for part in parts):
            return []
        placed = [(part.split, part.arrays[name].place()) for part in parts]
        if not all(array.text or len(array.shape) == 1 for _, array in placed):
            return []
        chunks = (
            (split, chunk)
            for split, array in placed
            for chunk in (array.string_chunks() if array.text else array.chunks())
        )
        return remark_on_groups(name, ((split, chunk.astype(str).tolist()) for split, chunk in chunks))

    def _settled(
        self, name: str, role: str, path: str, arrays: list[PlacedArray], remarks: list[str]
    ) -> tuple[Field, list[PlacedArray]]:
        """Return the field made of arrays (one per part), and the arrays that its values are read from."""
        where = f"{self._location}: {path}"
        if filled := next((array for array in arrays if array.filled), None):
            arrays = [self._alike(array, filled) for array in arrays]
        # Files may differ in their order of bytes: it is converted when a shard is written.
        kinds = {(array.shape[1:], array.dtype.newbyteorder("=").name, array.text) for array in arrays}
        if len(kinds) > 1:
            kinds_text = ", ".join(sorted(f"{'x'.join(map(str, shape)) or 'one'} {dtype}" for shape, dtype, _ in kinds))
            mixed = role == "target" and {len(shape) for shape, _, _ in kinds} == {0, 1}
            how = " (of one-hot rows, y.argmax(1) gives the numbers of classes)" if mixed else ""
            raise SourceError(f"{where}: the parts differ in shape or type: {kinds_text}; make them alike{how}")
        first = arrays[0]
        dtype = first.dtype.newbyteorder("=").name
        if not first.text and dtype not in DTYPES:
            raise SourceError(f"{where} holds {dtype}; {_remedy(first.dtype)}")
        if min(first.shape[1:], default=1) < 1:
            raise SourceError(f"{where} has the shape {first.shape}; a sample needs at least one value")
        _check_are_numbers(where, first)
        if role == "target":
            target = Target(name, path, arrays, self._spec)
            classes = target.as_classes(self.written, remarks, alone=len(self.masks) == 1)
            if classes is not None:
                return classes
        shape, variable = first.shape[1:], first.offsets is not None
        num_bytes = int(np.prod(shape)) * first.dtype.itemsize
        if num_bytes > MOST_ARRAY_BYTES:
            raise SourceError(f"{where}: a sample has {num_bytes} bytes, of at most {MOST_ARRAY_BYTES}; divide samples")
        if variable:
            lengths = np.concatenate([np.diff(array.starts) for array in arrays])
            shape = (max(1, int(lengths.max(initial=1))), *shape)
            if not first.text:
                empty = int((lengths == 0).sum())
                nothing = f"; {counted(empty, 'sample')} hold{'' if empty > 1 else 's'} nothing" if empty else ""
                remarks.append(
                    f"{name}: samples are {lengths.min()} to {lengths.max()} long, and zeros fill them{nothing}"
                )
        kind = "text" if first.text else "numbers"
        texts: list[str] = list(next(first.string_chunks(), ()))[:_TEXTS_SEEN] if first.text else []
        if role == "input" and self._spec.asks and not self._spec.inputs:
            ask_of_files(path, texts, where)
        if line := misread(texts):
            remarks.append(f"{name}: {line}")
        return Field(name=name, role=role, dtype=dtype, shape=shape, kind=kind, variable=variable), arrays

    def _row_numbers(self, splits: Sequence[str], arrays: Sequence[PlacedArray]) -> list[PlacedArray]:
        """Return the numbers of the samples in each part, which go on in the next one of its split.

        Shards are shuffled: outputs are matched with the source by these numbers.
        """
        starts: Counter[str] = Counter()
        numbered = []
        for split, array in zip(splits, arrays, strict=True):
            first = starts[split]
            starts[split] += array.num_samples
            numbered.append(self.written(_numbers(first, starts[split])))
        return numbered

    def _alike(self, array: PlacedArray, filled: PlacedArray) -> PlacedArray:
        """Convert integers to the float type of another part, so that all parts have one type."""
        if array.text or array.offsets is not None or array.dtype.kind not in "iu":
            return array
        made = self.written(chunk.astype(filled.dtype) for chunk in array.chunks())
        return dataclasses.replace(made, called=array.called)

    def _finite(
        self, part: ArrayGroup, fields: list[Field], column: Sequence[PlacedArray], remarks: list[str]
    ) -> Array | None:
        """Return the numbers of readable samples without NaN and infinity, None for all; SourceError unless allowed."""
        bad = np.zeros(column[0].num_samples, np.bool_)
        for item, array in zip(fields, column, strict=True):
            if self._spec.nan == "keep":
                break
            if item.kind == "class":
                bad |= np.concatenate([chunk == ABSENT for chunk in array.chunks()])
            if array.dtype.kind != "f":
                continue
            lines = self.not_finite(item, array)
            if lines.any() and self._spec.nan != "skip":
                # The file holds plain numbers where its attributes make NaN of them.
                why = f" ({array.remarks})" if " as NaN" in array.remarks else ""
                remedy = bytes_swapped(item, [array]) or "--nan skip leaves them out, --nan keep takes them"
                raise SourceError(
                    f"{self._location}: {item.name} of sample {int(np.argmax(lines))} is not finite (NaN or infinity), "
                    f"{counted(int(lines.sum()), 'sample')} in all{why}; {remedy}"
                )
            bad |= lines
        if bad.any():
            remarks.append(f"{int(bad.sum())} samples of {part.split} with NaN or infinity are left out")
        # After the remark: these samples are named one by one in the manifest.
        bad[list(_unreadable(column))] = True
        if not bad.any():
            return None
        return np.flatnonzero(~bad)


def _remarks_of(parts: Sequence[PlacedArray]) -> list[str]:
    """Return the remarks of an array's parts, each once; those of some parts alone say of how many."""
    counts = Counter(array.remarks for array in parts if array.remarks)
    return [
        line if count == len(parts) else f"{line}, in {count} of {len(parts)} parts" for line, count in counts.items()
    ]


def _other_palettes(parts: Sequence[PlacedArray]) -> list[str]:
    """Return what differs between the palettes of masks, within a part or between two of them."""
    palettes = Palettes()
    lines = [array.palette_conflict or palettes.conflict(array.palette) for array in parts]
    return [*filter(None, lines)][:1]


def _packed_in_part(parts: Sequence[PlacedArray]) -> list[str]:
    """Return what differs if attributes scale the whole numbers of some parts, and other parts hold such unscaled."""
    count = sum(any(name in array.remarks for name in ("scale_factor", "add_offset")) for array in parts)
    plain = [array for array in parts if array.dtype.kind in "iu" and not array.remarks]
    if not count or not plain:
        return []
    return [
        f"scaled by attributes in {count} of {len(parts)} parts, and {plain[0].dtype} as stored in {len(plain)}: do "
        "these lack scale_factor or add_offset?"
    ]


def _check_are_numbers(where: str, array: PlacedArray) -> None:
    """Raise SourceError for lists of bytes that are image files, whose bytes are no pixels."""
    if array.dtype != np.uint8 or array.text or not array.stored or len(array.shape) != (1 if array.offsets else 2):
        return
    firsts = array.starts[:_FILES_SEEN].tolist() if array.offsets else range(min(_FILES_SEEN, array.num_samples))
    end = array.shape[0]
    heads = [array.rows(at, min(_HEAD_BYTES, end - at) if array.offsets else 1).tobytes() for at in firsts if at < end]
    if heads and all(is_image_head(head[:_HEAD_BYTES]) for head in heads):
        raise SourceError(
            f"{where} holds image files (JPEG, PNG, ...), whose bytes are no pixels: save arrays of pixels, write the "
            "files into a folder for each class, or give a reader that decodes them (--reader FILE.py:NAME)"
        )


def _numbers(begin: int, end: int) -> Iterator[Array]:
    for first in range(begin, max(end, begin + 1), STRINGS):  # of nothing, too: its type is int64
        yield np.arange(first, min(first + STRINGS, end), dtype=np.int64)


def _free(name: str, fields: Sequence[Field]) -> str:
    """Return `name`, longer if a field is called so."""
    while any(item.name == name for item in fields):
        name += "_"
    return name


def _zeros(count: int) -> Iterator[Array]:
    for first in range(0, count, STRINGS):
        yield np.zeros(min(STRINGS, count - first), np.int64)


def _list(index: IndexWriter, split: str, number: int, classes: Iterable[Array], rows: Array | None) -> None:
    """List the samples of a part with labels `classes`; `rows` are the samples to take, None for all."""
    first = 0
    for labels in classes:
        if rows is None:
            add_numbered(index, split, number, labels, first=first)
        else:
            taken = rows[np.searchsorted(rows, first) : np.searchsorted(rows, first + len(labels))]
            for run in np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1):
                if len(run):
                    add_numbered(index, split, number, labels[run - first], first=int(run[0]))
        first += len(labels)


def _unreadable(column: Sequence[PlacedArray]) -> Mapping[int, str]:
    """Return the samples that one of the arrays cannot give, by number, with their names."""
    return {number: name for array in column for number, name in array.unreadable.items()}


def _location(array: PlacedArray) -> ArrayLocation:
    return ArrayLocation(
        file=str(array.path),
        offset=array.offset,
        shape=list(array.shape[1:]),
        # With the order of bytes, which the name of a type does not tell.
        dtype=array.dtype.str,
        offsets=str(array.offsets or ""),
    )


def _remedy(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "V" and dtype.names is None:
        what = f"opaque values of {dtype.itemsize} bytes are not taken"
        return f"{what}: save them as a type with a name" + (", bfloat16 as float32" if dtype.itemsize == 2 else "")
    if dtype.kind == "f":
        return "convert it by x.astype('float64')"
    remedies = {
        "c": "complex numbers are not taken: save real and imaginary part as two channels",
        "M": "dates are not taken: save them as numbers",
        "m": "spans of time are not taken: save them as numbers",
        "V": "records are not taken: save each of their parts as an array of its own",
        "O": "Python objects are not taken: save plain numbers or strings",
    }
    return remedies.get(dtype.kind, f"fields are text or one of {', '.join(DTYPES)}")

"""Samples that are rows of arrays, of any number, type and shape: list, check and read them.

A format only finds its arrays (`ArrayGroup` in placed.py). All else is common to all formats: which arrays are inputs
and targets (chosen.py), what their values are (values.py), and the rest here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.units import counted
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import DTYPES, Field
from hpcdl.data.sources.base.chosen import choose, divided, remarks_on_unused
from hpcdl.data.sources.base.labels import (
    CLASS_LISTS,
    MOST_CLASSES,
    NUMBER,
    class_numbers,
    named_labels,
    names_remark,
    plausible,
    question_of_quantities,
    question_of_words,
    sparse,
    words_among_numbers,
)
from hpcdl.data.sources.base.names import names_group, names_quantity
from hpcdl.data.sources.base.placed import STRINGS, ArrayGroup, PlacedArray, shape_text
from hpcdl.data.sources.base.source import Array, ArrayLocation, Content, Index, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import leaves_out_split, some
from hpcdl.data.sources.base.values import (
    ABSENT,
    are_whole,
    different,
    is_one_hot,
    labels_in,
    nearly_one_hot,
    numbers_in,
    values_in,
)
from hpcdl.data.sources.checks.groups import remark_on_groups
from hpcdl.data.sources.checks.numbers import as_fed, doubts, never_written, unscaled
from hpcdl.data.sources.checks.pairing import ask_of_order, copies_of_targets, one_of_all
from hpcdl.data.sources.layouts.flat import LAST, MOST_ARRAY_BYTES, FlatFiles, add_numbered, stamp_of


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
        where = self._location
        remarks: list[str] = []
        self.named.update(path for part in parts for path in part.arrays)
        parts = self.divided(parts, remarks)
        # Stage 1: which arrays are fields. Every split that is kept has every field below.
        left_out = [part.split for part in parts if leaves_out_split(part.split, self._spec.leave_out)]
        parts = [part for part in parts if part.split not in left_out]
        if not parts or not parts[0].arrays:
            raise SourceError(f"{where} holds no arrays of numbers or text; check it, or --format")
        chosen = choose(parts[0].arrays, self.inputs, self.targets, str(where))
        # Before any array is placed: pictures of targets keep the numbers of their files.
        self.masks = {*chosen.targets.values()}
        used = {*chosen.inputs.values(), *self.masks}
        unused = [path for path in parts[0].arrays if path not in used]
        wanted = [("input", *item) for item in chosen.inputs.items()]
        wanted += [("target", *item) for item in chosen.targets.items()]
        placed = []
        for _, _, path in wanted:
            missing = next((part for part in parts if path not in part.arrays), None)
            if missing is not None:
                raise SourceError(f"{where}: the split {missing.split} has no {path}; every split needs every field")
            placed.append((path, [part.arrays[path].place() for part in parts]))
            remarks += _remarks_of(placed[-1][1])
        named = any(array.called for path, own in placed for array in own if path in self.masks)
        unused = [path for path in unused if not (named and path.rpartition("/")[2].lower() in CLASS_LISTS)]
        remarks += remarks_on_unused(unused, self._spec)
        remarks += self._remarks_on_groups(parts, used)
        placed = self._samples_of(parts, placed, remarks)  # first: arrays of one sample a file have other counts
        self._check_counts(parts, placed)
        for part, raw in zip(parts, zip(*(per_part for _, per_part in placed), strict=True), strict=True):
            remarks += filter(None, [never_written(part.split, raw)])
        settled = [  # stage 2: one type and shape over all splits; classes become numbers
            self._settled(name, role, path, per_part, remarks)
            for (role, name, path), (_, per_part) in zip(wanted, placed, strict=True)
        ]
        fields, arrays = [made for made, _ in settled], [per_part for _, per_part in settled]
        remarks += self._remarks_on_numbers(fields, arrays, [part.split for part in parts])
        columns = list(zip(*arrays, strict=True))
        labels = [number for number, item in enumerate(fields) if item.role == "target" and item.kind == "class"]
        # Stage 3: the list. Rows are those samples that every field can give.
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

    def _samples_of(
        self, parts: Sequence[ArrayGroup], placed: list[tuple[str, list[PlacedArray]]], remarks: list[str]
    ) -> list[tuple[str, list[PlacedArray]]]:
        """Return `placed`, with one sample per file if requested or the only reading; SourceError if ambiguous."""
        flag_value, files = self._spec.sample_is, f"{len(parts)} files"
        arrays = [array for _, per_part in placed for array in per_part]
        if flag_value == "row" or not any(array.path.is_file() for array in arrays):
            return placed
        scalars = any(not array.shape for array in arrays)
        if scalars and len(parts) < 2 and not flag_value:
            single = next(path for path, per_part in placed if not per_part[0].shape)
            raise SourceError(f"{self._location}: {single} is a single value; a field has one for each sample")
        if not flag_value and not (scalars and len(parts) > 1):
            rows = self._spec.format not in ("hdf5", "numpy")  # a file of these formats may be one sample; a table not
            if rows or len(parts) < 2 or not self._may_be_samples(placed):
                return placed
            what = ", ".join(
                f"{path} {shape_text(per_part[0].shape, per_part[0].dtype.name)}" for path, per_part in placed
            )
            raise SourceError(
                f"{self._location}: is each of its {files} one sample, or is each row of their arrays one ({what})? "
                "Give --sample-is file or --sample-is row"
            )
        remarks.append(f"each of the {files} is one sample")
        return [(path, self._one_a_file(per_part)) for path, per_part in placed]

    def _may_be_samples(self, placed: Sequence[tuple[str, list[PlacedArray]]]) -> bool:
        """Return whether each part may be one sample: arrays of unequal length, or all alike in the first two axes."""
        if any(array.offsets is not None or array.text for _, per_part in placed for array in per_part):
            return False
        firsts = [per_part[0] for _, per_part in placed]
        if len({array.num_samples for array in firsts}) > 1:
            return True
        return all(len(array.shape) > 1 for array in firsts) and len({array.shape[:2] for array in firsts}) == 1

    def _one_a_file(self, arrays: Sequence[PlacedArray]) -> list[PlacedArray]:
        """Return each whole array as one sample; of any length along the first axis if arrays differ only there."""
        if all(array.text and array.num_samples == 1 for array in arrays):
            return list(arrays)
        if any(array.offsets is not None or array.text for array in arrays):
            raise SourceError(f"{self._location}: --sample-is file is for arrays of numbers of one length")
        if len({array.shape for array in arrays}) == 1:
            return [dataclasses.replace(array, shape=(1, *array.shape)) for array in arrays]
        samples = []
        for array in arrays:
            starts = self._work / f"array{len(list(self._work.glob('array*')))}.offsets"
            np.array([0, array.shape[0]], np.int64).tofile(starts)
            samples.append(dataclasses.replace(array, offsets=starts))
        return samples

    def _check_counts(self, parts: Sequence[ArrayGroup], arrays: Sequence[tuple[str, list[PlacedArray]]]) -> None:
        for number, part in enumerate(parts):
            counts = {path: per_part[number].num_samples for path, per_part in arrays}
            what = "" if part.split == UNSPLIT else f" of the split {part.split}"
            if len(set(counts.values())) != 1:
                totals = ", ".join(f"{path} {count}" for path, count in counts.items())
                remedy = _samples_last({path: per_part[number] for path, per_part in arrays}, self._spec)
                raise SourceError(
                    f"{self._location}: the arrays{what} hold unequal numbers of samples ({totals}); every field needs "
                    f"one value a sample, along its first axis{remedy}"
                )
            if not next(iter(counts.values())):
                raise SourceError(
                    f"{self._location}: {next(iter(counts))}{what} holds no samples; there is nothing to shard"
                )
            ask_of_order({path: found.place for path, found in part.arrays.items()}, counts, self._spec, self.named)

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
            raise SourceError(f"{where}: the parts differ in shape or type: {kinds_text}; make them alike")
        first = arrays[0]
        dtype = first.dtype.newbyteorder("=").name
        if not first.text and dtype not in DTYPES:
            raise SourceError(f"{where} holds {dtype}; {_remedy(first.dtype)}")
        if min(first.shape[1:], default=1) < 1:
            raise SourceError(f"{where} has the shape {first.shape}; a sample needs at least one value")
        if role == "target":
            classes = self._classes(name, path, arrays, remarks)
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
        return Field(name=name, role=role, dtype=dtype, shape=shape, kind=kind, variable=variable), arrays

    def _alike(self, array: PlacedArray, filled: PlacedArray) -> PlacedArray:
        """Convert integers to the float type of another part, so that all parts have one type."""
        if array.text or array.offsets is not None or array.dtype.kind not in "iu":
            return array
        made = self.written(chunk.astype(filled.dtype) for chunk in array.chunks())
        return dataclasses.replace(made, called=array.called)

    def _classes(
        self, name: str, path: str, arrays: list[PlacedArray], remarks: list[str]
    ) -> tuple[Field, list[PlacedArray]] | None:
        """Return the field of a target whose values are classes; None for quantities."""
        where, flag_value = f"{self._location}: {path}", self._spec.target_kind
        first = arrays[0]
        single = first.text or (not first.offsets and int(np.prod(first.shape[1:])) == 1)
        if flag_value != "regression":
            _ask_of_lists(where, first)
        if not single and flag_value != "regression" and (one_hot := self._one_hot(name, arrays, remarks)):
            return one_hot
        vector = not single and len(first.shape) == 2 and first.dtype.kind == "f" and not first.offsets
        if vector and flag_value == "class" and len(self.masks) == 1 and not all(map(are_whole, values_in(arrays))):
            raise SourceError(f"{where}: {self._no_class(arrays)}")
        if not single or (flag_value == "regression" and not first.text):
            return None
        floats = not first.text and first.dtype.kind == "f"
        # With --nan skip a missing label leaves its sample out, and does not make quantities of the others.
        if floats and not all(map(are_whole, values_in(arrays, finite=self._spec.nan == "skip"))):
            if flag_value == "class":
                raise SourceError(f"{where}: {self._no_class(arrays)}")
            return None
        labels, over = different(arrays)
        if not len(labels):
            raise SourceError(f"{where}: no sample has a value; there is nothing to shard")
        if first.text:
            self._check_words(labels.tolist(), where)
        num_samples = sum(array.num_samples for array in arrays)
        if not flag_value and not plausible(len(labels), num_samples):
            what = "strings" if first.text else "whole numbers"
            remedy = "--target-kind class" + ("" if first.text else ", or --target-kind regression for quantities")
            raise SourceError(
                f"{where} holds {over}{len(labels)} different {what} in {num_samples} samples: are these classes? Give "
                f"{remedy}"
            )
        if not flag_value and not floats:
            _ask_of_quantities(where, path, labels, coded=first.text or any(array.called for array in arrays))
        if not flag_value and floats and not any(array.filled for array in arrays):
            raise SourceError(
                f"{where} is {first.dtype.name}, but holds whole numbers only ({labels[0]} to {labels[-1]}): classes "
                "or quantities? Give --target-kind class or --target-kind regression"
            )
        if len(labels) > MOST_CLASSES:
            raise SourceError(
                f"{where} holds {over}{len(labels)} different values; no data set has over {MOST_CLASSES} classes"
            )
        if first.text:
            names, lines = [str(value) for value in labels.tolist()], ["-"]
        else:
            enumeration = one_enumeration([array.called for array in arrays], where)
            names, lines = named_labels(labels, enumeration)
            remarks += [names_remark(name, names)] if enumeration else [f"{name}: {line}" for line in lines]
        made = Field(name=name, role="target", dtype="int64", kind="class", class_names=names)
        sorted_labels = labels if lines else np.arange(len(names))  # labels that keep their numbers may have gaps
        return made, [
            self.written(numbers_in(sorted_labels, chunk, floats=floats) for chunk in labels_in([array]))
            for array in arrays
        ]

    def _one_hot(
        self, name: str, arrays: list[PlacedArray], remarks: list[str]
    ) -> tuple[Field, list[PlacedArray]] | None:
        """Return the field of one-hot classes if --target-kind asks for it; SourceError if some rows are not so."""
        as_classes = self._spec.target_kind == "class"
        if is_one_hot(arrays):
            if as_classes:
                return self._from_one_hot(name, arrays)
            remarks.append(f"{name}: a 1 among zeros in each row (one-hot): --target-kind class makes it class numbers")
        elif line := nearly_one_hot(name, arrays):
            if as_classes:
                raise SourceError(f"{self._location}: {line} One class a sample needs a 1 in each row; take them out")
            remarks.append(line)
        return None

    def _from_one_hot(self, name: str, arrays: Sequence[PlacedArray]) -> tuple[Field, list[PlacedArray]]:
        """Return the field of classes written one-hot, and arrays of their numbers."""
        names = class_numbers(arrays[0].shape[1])
        made = Field(name=name, role="target", dtype="int64", kind="class", class_names=names)
        return made, [self.written(chunk.argmax(1).astype(np.int64) for chunk in array.chunks()) for array in arrays]

    def _check_words(self, labels: list[str], where: str) -> None:
        """Raise SourceError for a target of numbers that a few words make text."""
        flag_value = self._spec.target_kind
        measured = [word for word in labels if NUMBER.fullmatch(word)]
        if flag_value != "class" and len(measured) == len(labels) and any(float(word) % 1 for word in labels):
            raise SourceError(
                f"{where} holds numbers as text, such as {shown(measured[0])}: classes or quantities? Save quantities "
                "as numbers, or give --target-kind class"
            )
        if flag_value == "regression" and (words := words_among_numbers(labels)):
            raise SourceError(f"{where} holds {some(words)} among numbers; correct it, or take such samples out")
        if not flag_value and (question := question_of_words(labels) or question_of_quantities(labels)):
            raise SourceError(f"{where} holds {question}")

    def _no_class(self, arrays: Sequence[PlacedArray]) -> str:
        """Return why the values of a target are not classes, and which flag helps."""
        if all(map(are_whole, values_in(arrays, finite=True))):
            return "missing values (NaN or infinity) name no class; --nan skip leaves such samples out"
        return "values that are not whole name no classes; give --target-kind regression"

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
                raise SourceError(
                    f"{self._location}: {item.name} of sample {int(np.argmax(lines))} is not finite (NaN or infinity), "
                    f"{counted(int(lines.sum()), 'sample')} in all; --nan skip leaves them out, --nan keep takes them"
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


def _ask_of_lists(where: str, array: PlacedArray) -> None:
    """Raise SourceError for a target of lists of whole numbers: several labels, or a sequence."""
    if array.offsets is not None and len(array.shape) == 1 and array.dtype.kind in "iu" and not array.text:
        raise SourceError(
            f"{where} holds lists of whole numbers, of unequal length: several labels of a sample, or a sequence? "
            "Labels need an array of 0 and 1 for each sample. For sequences, which zeros fill to the longest, give "
            "--target-kind regression"
        )


def _ask_of_quantities(where: str, path: str, labels: Array, *, coded: bool) -> None:
    """Raise SourceError for whole numbers called as a quantity, or few in a wide range.

    `coded`: words, or numbers that have names, are classes.
    """
    if not coded and ((len(labels) > 2 and names_quantity(path)) or sparse(labels.tolist())):
        raise SourceError(
            f"{where} holds {len(labels)} different whole numbers from {labels[0]} to {labels[-1]}: classes or "
            "quantities? Give --target-kind class or --target-kind regression"
        )


def one_enumeration(called: Sequence[Mapping[int, str]], where: str) -> Mapping[int, str]:
    """Return the names of numbers that all parts agree on; SourceError if names or numbers conflict between parts."""
    names: dict[int, str] = {}
    for part in called:
        for number, word in part.items():
            conflict = next((entry for entry in names.items() if (entry[0] == number) != (entry[1] == word)), None)
            if conflict is not None:
                raise SourceError(
                    f"{where}: enumerations differ: {conflict[0]} is {shown(conflict[1])} in one file, {number} is "
                    f"{shown(word)} in another; write them alike"
                )
            names[number] = word
    return names


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
    remedies = {
        "c": "complex numbers are not taken: save real and imaginary part as two channels",
        "M": "dates are not taken: save them as numbers",
        "m": "spans of time are not taken: save them as numbers",
        "V": "records are not taken: save each of their parts as an array of its own",
        "O": "Python objects are not taken: save plain numbers or strings",
    }
    return remedies.get(dtype.kind, f"fields are text or one of {', '.join(DTYPES)}")


def _samples_last(arrays: Mapping[str, PlacedArray], spec: SourceSpec) -> str:
    """Say what to do if an array's last axis has as many elements as others have samples; empty otherwise."""
    for path, array in arrays.items():
        others = {other.num_samples for name, other in arrays.items() if name != path}
        if len(array.shape) > 1 and others == {array.shape[-1]}:
            hint = f"; {path} seems to have its samples along the last"
            if spec.format in ("hdf5", "numpy") and spec.sample_axis != LAST:
                return f"{hint}: give --sample-axis last"
            return f"{hint}: save it as np.moveaxis({path}, -1, 0)"
    lasts = {array.shape[-1] for array in arrays.values() if array.offsets is None and len(array.shape) > 1}
    alike = all(array.offsets is None and lasts == {array.shape[-1]} for array in arrays.values())
    if alike and spec.format in ("hdf5", "numpy") and spec.sample_axis != LAST:
        return f"; all have {lasts.pop()} along their last: give --sample-axis last if it counts samples"
    return ""

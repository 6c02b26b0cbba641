"""Parquet files: columns of numbers, text, lists, or image files as in Hugging Face data sets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.chosen import INPUT_NAMES, TARGET_NAMES, remarks_on_unused
from hpcdl.data.sources.base.glance import files_of, folders_of, is_image_head
from hpcdl.data.sources.base.placed import PlacedArray, TableColumn
from hpcdl.data.sources.base.source import Array, IndexWriter, SourceFacts
from hpcdl.data.sources.base.splits import SPLIT_WORDS, leaves_out_split
from hpcdl.data.sources.layouts.columns import ColumnSource
from hpcdl.data.sources.layouts.flat import EncodedFiles, files_by_split, is_made_of, remarks_on_files
from hpcdl.data.sources.layouts.gathered import GatheredArray
from hpcdl.data.sources.layouts.targets import one_enumeration

_SUFFIXES = (".parquet", ".pq")
# pandas writes the index of a table as such a column, which is no data.
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
_LOOKED_INTO = 256
_CHUNK_BYTES, _MOST_ROWS = 8 << 20, 1 << 16
_BUFFER_BYTES = 1 << 20
"""With a buffer pyarrow reads page by page; without one it reads a row group's whole column."""


class _Table:
    """The rows of Parquet files with the same columns, read in pieces; with `words` only those of one split.

    `words` are the values of the column `split` for that split.
    """

    def __init__(self, source: ParquetSource, paths: Sequence[Path], words: frozenset[str] = frozenset()) -> None:
        self._source, self._paths, self._words = source, paths, words
        with source.understood(paths[0]):
            schema = self._file(paths[0]).schema_arrow
        # Columns are asked for by name, which would mean either of the two.
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise SourceError(f"{paths[0]} has two columns called {shown(twice)}; rename one")
        self._features = [_features(schema)]
        for path in paths[1:]:
            with source.understood(path):
                other = self._file(path).schema_arrow
            if (features := _features(other)) not in self._features:
                self._features.append(features)
            if not other.equals(schema):
                odd = next((field.name for field in other if field not in schema), "their order")
                raise SourceError(f"{path} has other columns, or types, than {paths[0].name} ({shown(odd)})")
        # Within one split the column that divides the rows says nothing more.
        fields = [field.with_type(_read_as(field.type)) for field in schema if not (words and field.name == "split")]
        self.schema = _pyarrow()[0].schema(fields, schema.metadata)

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema.names)

    def called(self, name: str, where: str) -> Mapping[int, str]:
        """Return what Hugging Face calls the classes of a column, by number; SourceError if files differ."""
        return one_enumeration([_class_names(features, name) for features in self._features], where)

    def shown_row(self, number: int) -> str:
        """Return the name of a row for messages; rows are counted over all files."""
        more = f" and {len(self._paths) - 1} more" if len(self._paths) > 1 else ""
        return f"row {number} of {self._paths[0].name}{more}"

    def of_split(self, words: Iterable[str]) -> _Table:
        """Return the rows of one split, selected by the values of the column `split`."""
        return _Table(self._source, self._paths, frozenset(words))

    def chunks(self, name: str) -> Iterator[Any]:
        """Yield the values of a column as pyarrow arrays of some MiB."""
        wanted = [name, "split"] if self._words and name != "split" else [name]
        for path in self._paths:
            with self._source.understood(path):
                file = self._file(path)
                rows = max(1, min(_MOST_ROWS, _CHUNK_BYTES // _row_bytes(file.metadata, name)))
                for batch in file.iter_batches(rows, columns=wanted, use_threads=False):
                    column = batch.column(batch.schema.get_field_index(name))
                    kind = _read_as(column.type)
                    column = column if column.type == kind else column.cast(kind)
                    if self._words:
                        words = batch.column(batch.schema.get_field_index("split")).to_pylist()
                        column = column.filter(_pyarrow()[0].array([_word(word) in self._words for word in words]))
                    yield column

    def contents(self, name: str) -> Iterator[bytes | None]:
        """Yield the image files of a column; None for a missing one."""
        for chunk in self.chunks(name):
            for value in chunk.to_pylist():
                # Hugging Face stores an image as a struct of its bytes and its path.
                yield value["bytes"] if isinstance(value, dict) else value

    def _file(self, path: Path) -> Any:
        # pre_buffer would read a row group's whole column ahead, whatever the buffer's size.
        return _pyarrow()[1].ParquetFile(
            path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )


def _row_bytes(metadata: Any, name: str) -> int:
    """Estimate the uncompressed bytes of a column per row of a file."""
    total_bytes = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(at) for at in range(group.num_columns))
        # A nested column is stored leaf by leaf (image.bytes, image.path); the dot keeps image2 apart.
        total_bytes += sum(
            column.total_uncompressed_size for column in columns if f"{column.path_in_schema}.".startswith(f"{name}.")
        )
    return max(1, int(total_bytes // max(1, metadata.num_rows)))


def _partition(location: Path) -> str:
    """Return the first KEY=VALUE folder of a partitioned data set, as Hive and Spark write it; empty if none."""
    at, parts = location, []
    while at.is_dir():
        inside = next((folder for folder in folders_of(at) if "=" in folder.name), None)
        if inside is None:
            break
        parts.append(inside.name)
        at = inside
    holds_files = parts and any(path.name.lower().endswith(_SUFFIXES) for path in files_of(at))
    return "/".join(parts) if holds_files else ""


def _word(value: Any) -> str:
    return str(value).strip().lower()


class ParquetSource(ColumnSource):
    """One Parquet file, or a folder of them; files called train*, val*, test* or a column `split` make splits.

    Row groups are read in pieces, column by column: memory does not grow with the files.
    """

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept files with one of Parquet's endings, and KEY=VALUE folders of them."""
        return is_made_of(location, _SUFFIXES) or bool(_partition(location))

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read the requested columns, one by one."""
        files = files_by_split(self._location, _SUFFIXES, self._spec)
        left = [split for split in files if leaves_out_split(split, self._spec.leave_out)]
        self.named.update(left)
        facts = self._listed({split: own for split, own in files.items() if split not in left}, index)
        remarks = remarks_on_files(self._location, _SUFFIXES)
        remarks += [f"left out: the split {own}" for own in left]
        return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])

    def _listed(self, files: Mapping[str, Sequence[Path]], index: IndexWriter) -> SourceFacts:
        tables = {split: _Table(self, paths) for split, paths in files.items()}
        if not tables:
            inside = _partition(self._location)
            if inside:
                raise SourceError(
                    f"{self._location} is partitioned (its rows are in folders such as {shown(inside)}), which is not "
                    f"read: join it into one file, with pandas: pandas.read_parquet({str(self._location)!r})"
                    ".to_parquet('joined.parquet', index=False)"
                )
            raise SourceError(f"{self._location} holds no Parquet files ({', '.join(_SUFFIXES)})")
        first = next(iter(tables.values()))
        for split, table in tables.items():
            if table.names != first.names:
                odd = sorted({*table.names} ^ {*first.names}) or table.names
                raise SourceError(
                    f"{self._location}: the files of {split} have other columns ({shown(odd[0])}); make them alike, or "
                    f"give --leave-out with a split, such as test"
                )
        # Files that are named after splits have settled it already.
        if list(tables) == [UNSPLIT] and "split" in first.names:
            tables = self._by_column(first)
        image = self._image_column(first)
        if image is not None:
            return self._list_images(tables, image, index)
        return self.list_columns(
            {
                split: {name: self._column(table, name) for name in table.names if not _PANDAS_INDEX.fullmatch(name)}
                for split, table in tables.items()
            },
            index,
        )

    @contextmanager
    def understood(self, path: Path) -> Iterator[None]:
        """Turn errors of pyarrow into SourceError."""
        arrow, _ = _pyarrow()
        try:
            yield
        except (arrow.ArrowException, OSError) as error:
            raise SourceError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())[:200]}") from error

    def _by_column(self, table: _Table) -> dict[str, _Table]:
        words: dict[str, str] = {}
        for chunk in table.chunks("split"):
            words |= {word: SPLIT_WORDS.get(word, word) for word in map(_word, chunk.unique().to_pylist())}
        odd = min({*words.values()} - {"train", "val", "test"}, default=None)
        if odd is not None:
            raise SourceError(f"{self._location}: the column split holds {shown(odd)}; write train, val or test")
        return {
            split: table.of_split(word for word, own in words.items() if own == split)
            for split in dict.fromkeys(words.values())
        }

    def _column(self, table: _Table, name: str) -> TableColumn:
        types = _pyarrow()[0].types
        kind = table.schema.field(name).type
        load = functools.partial(self._placed_column, table, name)
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            numbers = functools.partial(self._numbers, table, name)
            return TableColumn(shown=str(kind), kind="number", place=numbers, numbers=numbers)
        if types.is_timestamp(kind) or types.is_date(kind):
            times = functools.partial(self._times, table, name)
            return TableColumn(shown=str(kind), kind="other", place=load, times=times)
        text = self._is_text(table, name)
        return TableColumn(shown="text" if text else str(kind), kind="text" if text else "other", place=load)

    def _times(self, table: _Table, name: str) -> Iterator[tuple[str, str]]:
        """Yield the first and the last time of each piece of a column."""
        from pyarrow import compute

        for chunk in table.chunks(name):
            ends = compute.min_max(chunk).as_py()
            if ends["min"] is not None:
                yield str(ends["min"]), str(ends["max"])

    def _numbers(self, table: _Table, name: str) -> PlacedArray:
        """Return a column of numbers; integers with missing values (null) become float64 with NaN."""
        floats = _pyarrow()[0].types.is_floating(table.schema.field(name).type)
        # Floats need no other type for a missing value, which is NaN there.
        holes = not floats and any(chunk.null_count for chunk in table.chunks(name))

        def values() -> Iterator[Array]:
            for chunk in table.chunks(name):
                with self.understood(self._location):
                    numbers = chunk.cast("float64") if holes else chunk
                yield numbers.to_numpy(zero_copy_only=False)

        called = table.called(name, f"{self._location}: {name}")
        return dataclasses.replace(self.written(values()), filled=holes, called=called)

    def _placed_column(self, table: _Table, name: str) -> PlacedArray:
        """Return text, images or lists of numbers; SourceError for other types and for missing values."""
        types, kind = _pyarrow()[0].types, table.schema.field(name).type
        missing = sum(chunk.null_count for chunk in table.chunks(name))
        if missing:
            raise SourceError(f"{self._location}: {name} has no value in {missing} rows (null); fill or drop them")
        if self._is_text(table, name):
            with self._gathered(name) as gathered:
                values = (text for chunk in table.chunks(name) for text in chunk.cast("large_binary").to_pylist())
                for number, value in enumerate(values):
                    if _holds_bytes(kind) and not _is_plain_text(value):
                        raise SourceError(
                            f"{self._location}: {name} of row {number} is bytes that are neither text nor an image "
                            "file; save numbers as lists"
                        )
                    gathered.add(value, f"row {number}")
                return gathered.placed()
        if _holds_bytes(kind):
            return self._pictures(table, name)
        levels = 0
        while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            levels, kind = levels + 1, kind.value_type
        number = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
        if not levels or not number:
            raise SourceError(
                f"{self._location}: {name} is {table.schema.field(name).type}; fields are numbers, text or lists of "
                "numbers: save dates and decimals as numbers, and each part of a struct as a column"
            )
        return self._lists(table, name, levels)

    def _is_text(self, table: _Table, name: str) -> bool:
        """Return whether a column is text, or bytes that are no image files: these are read as text."""
        types, kind = _pyarrow()[0].types, table.schema.field(name).type
        if types.is_binary(kind) or types.is_large_binary(kind):
            return not self._first_image(table, name)
        return bool(types.is_string(kind) or types.is_large_string(kind))

    def _first_image(self, table: _Table, name: str) -> bool:
        """Return whether the first values of a column include an image file."""
        contents = itertools.islice(table.contents(name), _LOOKED_INTO)
        # The first rows may have no value (null).
        return any(content is not None and is_image_head(content[:16]) for content in contents)

    def _gathered(self, name: str, *, fixed: bool = False) -> GatheredArray:
        path = self._work / f"gathered{len(list(self._work.glob('gathered*')))}"
        return GatheredArray(path, f"{self._location}: {name}", fixed=fixed)

    def _pictures(self, table: _Table, name: str) -> PlacedArray:
        """Decode a column of image files to pixels."""
        with self._gathered(name, fixed=True) as gathered:
            for number, content in enumerate(table.contents(name)):
                gathered.add_picture(
                    content or b"", table.shown_row(number), mask=name in self.masks, skips=not self._spec.checks
                )
            return gathered.placed()

    def _lists(self, table: _Table, name: str, levels: int) -> PlacedArray:
        """Return nested lists of numbers as samples of one shape, or of any length along the first axis."""
        inner: list[set[int]] = [set() for _ in range(levels - 1)]
        outer: list[Array] = []

        def values() -> Iterator[Array]:
            for chunk in table.chunks(name):
                # Lengths come beside the values, in the same pass: the files are read once.
                outer.append(chunk.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
                flat = chunk.flatten()
                for lengths in inner:
                    lengths |= set(np.unique(flat.value_lengths().to_numpy(zero_copy_only=False)).tolist())
                    flat = flat.flatten()
                if any(len(lengths) > 1 for lengths in inner):
                    raise SourceError(
                        f"{self._location}: lists in {name} differ in length within a sample; only the first axis may "
                        "vary"
                    )
                if flat.null_count:
                    raise SourceError(f"{self._location}: lists in {name} have holes (null); fill them, or save NaN")
                yield flat.to_numpy(zero_copy_only=False)

        placed = self.written(values())
        sides = [int(next(iter(lengths), 0)) for lengths in inner]
        lengths = np.concatenate(outer) if outer else np.zeros(0, np.int64)
        if len(lengths) and (lengths == lengths[0]).all():
            return dataclasses.replace(placed, shape=(len(lengths), int(lengths[0]), *sides))
        starts = placed.path.with_name(f"{placed.path.name}.offsets")
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64).tofile(starts)
        return dataclasses.replace(placed, shape=(int(lengths.sum()), *sides), offsets=starts)

    def _image_column(self, table: _Table) -> str | None:
        """Return the name of the column of image files, if samples are images with a class."""
        spec = self._spec
        if spec.inputs or spec.targets or spec.target_kind == "regression":
            return None
        names = [spec.image_field] if spec.image_field else [*INPUT_NAMES, "img", *table.names]
        for name in names:
            holds_bytes = name in table.names and _holds_bytes(table.schema.field(name).type)
            if holds_bytes and self._first_image(table, name):
                return name
        if spec.image_field:
            raise SourceError(
                f"{self._location}: the column {shown(spec.image_field)} holds no image files; "
                f"it has {', '.join(map(shown, table.names[:20]))}"
            )
        return None

    def _list_images(self, tables: dict[str, _Table], image: str, index: IndexWriter) -> SourceFacts:
        """Unpack the image files into the work folder, and list them with their labels."""
        if self._spec.categories:
            raise UsageError(
                f"--categories {self._spec.categories[0]} is for columns beside the images: name all with --input and "
                "--target"
            )
        schema = next(iter(tables.values())).schema
        # CIFAR-100 of Hugging Face has a coarse and a fine label.
        label = self._spec.label_field or next(
            (name for name in (*TARGET_NAMES, "fine_label") if name in schema.names), None
        )
        if label is None or label not in schema.names:
            raise SourceError(
                f"{self._location}: which column is the label? Give --label-field, one of "
                f"{', '.join(map(shown, schema.names[:20]))}"
            )
        listed = EncodedFiles(index, self._spec)
        for split, table in tables.items():
            path = self._work / f"images.{split}"
            with path.open("wb") as file:
                listed.add_file(split, path, self._unpacked(table, image, label, file))
        self.named.update(schema.names)
        unused = [name for name in schema.names if name not in (image, label, "split")]
        where = f"{self._location}: {label}"
        called = one_enumeration([table.called(label, where) for table in tables.values()], where)
        facts = listed.facts([called[number] for number in sorted(called)])
        return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks_on_unused(unused, self._spec, "column")])

    def _unpacked(self, table: _Table, image: str, label: str, file: BinaryIO) -> Iterator[tuple[int, int, Any]]:
        """Write the image files of a table one after another; yield offset, size and label of each."""
        end = 0
        is_text = self._is_text(table, label)
        chunks = self._placed_column(table, label).string_chunks() if is_text else table.chunks(label)
        labels: Iterator[Any] = (value for chunk in chunks for value in chunk.tolist())
        for number, (content, row_label) in enumerate(zip(table.contents(image), labels, strict=True)):
            if content is None:
                raise SourceError(f"{self._location}: {image} of row {number} has no bytes (null)")
            file.write(content)
            yield end, len(content), row_label
            end += len(content)


def _read_as(kind: Any) -> Any:
    """Return the type that a column is read as: that of a dictionary's values; of a view, the plain type."""
    arrow, _ = _pyarrow()
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if arrow.types.is_fixed_size_binary(kind):
        return arrow.large_binary()
    # By name, because not every supported pyarrow has predicates for views.
    if str(kind).startswith(("list_view<", "large_list_view<")):
        return arrow.large_list(kind.value_type)
    views = {"string_view": arrow.large_string(), "binary_view": arrow.large_binary()}
    return views.get(str(kind), kind)


def _holds_bytes(kind: Any) -> bool:
    types = _pyarrow()[0].types
    if types.is_struct(kind):
        return "bytes" in [kind.field(number).name for number in range(kind.num_fields)]
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_plain_text(content: bytes) -> bool:
    """Return whether bytes are UTF-8 without zeros, which numbers have and texts have not."""
    with suppress(UnicodeDecodeError):
        return "\0" not in content.decode()
    return False


def _features(schema: Any) -> dict[str, Any]:
    """Return what Hugging Face data sets store about their columns, by name; empty if there is nothing."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _class_names(features: Mapping[str, Any], column: str) -> dict[int, str]:
    own = features.get(column)
    names = own.get("names") if isinstance(own, dict) else None
    return dict(enumerate(map(str, names))) if isinstance(names, list) else {}


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError("Parquet needs the package pyarrow; pip install 'hpcdl[parquet]'") from None
    return pyarrow, pyarrow.parquet

"""Parquet files: columns of numbers, text, lists, or image files as Hugging Face's data sets have them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.arrays import INPUT_NAMES, TARGET_NAMES, PlacedArray
from hpcdl.data.sources.base.columns import ColumnSource, TableColumn
from hpcdl.data.sources.base.flat import EncodedFiles, files_by_split, is_made_of
from hpcdl.data.sources.base.foreign import is_image_head
from hpcdl.data.sources.base.gathered import GatheredArray
from hpcdl.data.sources.base.index import IndexWriter
from hpcdl.data.sources.base.source import Array, SourceFacts, UnreadableSample
from hpcdl.data.sources.base.splits import SPLIT_WORDS

_ENDINGS = (".parquet", ".pq")
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
_ROWS = 256


class ParquetSource(ColumnSource):
    """One Parquet file, or a folder of them; files called train*, val*, test* or a column `split` make splits."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Files with one of Parquet's endings."""
        return is_made_of(location, _ENDINGS)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read what is asked for, column by column."""
        tables = {
            split: self._opened(paths) for split, paths in files_by_split(self._location, _ENDINGS, self._spec).items()
        }
        if not tables:
            raise SourceError(f"{self._location} holds no Parquet files ({', '.join(_ENDINGS)})")
        first = next(iter(tables.values()))
        for split, table in tables.items():
            if table.schema.names != first.schema.names:
                odd = sorted({*table.schema.names} ^ {*first.schema.names}) or table.schema.names
                raise SourceError(f"{self._location}: the files of {split} have other columns ({shown(odd[0])})")
        if list(tables) == [UNSPLIT] and "split" in first.schema.names:
            tables = self._by_column(first)
        image = self._image_column(first)
        if image is not None:
            return self._list_images(tables, image, index)
        return self.list_columns(
            {
                split: {name: self._column(table, name) for name in table.schema.names
                        if not _PANDAS_INDEX.fullmatch(name)}
                for split, table in tables.items()
            },
            index,
        )  # fmt: skip

    def _opened(self, paths: list[Path]) -> Any:
        """The rows of all files as one pyarrow table, mapped where that goes."""
        arrow, parquet = _pyarrow()
        found = []
        for path in paths:
            with self._understood(path):
                found.append(parquet.read_table(path, partitioning=None))
        with self._understood(self._location):
            return arrow.concat_tables(found)

    @contextmanager
    def _understood(self, path: Path) -> Iterator[None]:
        arrow, _ = _pyarrow()
        try:
            yield
        except (arrow.ArrowException, OSError) as error:
            raise SourceError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())[:200]}") from error

    def _by_column(self, table: Any) -> dict[str, Any]:
        words = [str(word).strip().lower() for word in table.column("split").to_pylist()]
        splits = [SPLIT_WORDS.get(word, word) for word in words]
        if not set(splits) <= {"train", "val", "test"}:
            raise SourceError(
                f"{self._location}: the column split holds {shown(min(set(splits)))}; write train, val or test"
            )
        table = table.drop_columns(["split"])
        return {name: table.filter([own == name for own in splits]) for name in dict.fromkeys(splits)}

    def _column(self, table: Any, name: str) -> TableColumn:
        types = _pyarrow()[0].types
        kind = table.schema.field(name).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        place = functools.partial(self._placed_column, table, name)
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            numbers = functools.partial(self._numbers, table, name)
            return TableColumn(shown=str(kind), kind="number", place=lambda: self.placed(numbers()), numbers=numbers)
        text = types.is_string(kind) or types.is_large_string(kind)
        return TableColumn(shown="text" if text else str(kind), kind="text" if text else "other", place=place)

    def _numbers(self, table: Any, name: str) -> Array:
        column = table.column(name)
        if column.null_count and not _pyarrow()[0].types.is_floating(column.type):
            column = column.cast("float64")
        found: Array = column.to_numpy()
        return found

    def _placed_column(self, table: Any, name: str) -> PlacedArray:
        """Text, or lists of numbers; SourceError for other types and for missing values."""
        types, column = _pyarrow()[0].types, table.column(name).combine_chunks()
        if column.null_count:
            raise SourceError(
                f"{self._location}: {name} has no value in {column.null_count} rows (null); fill or drop them"
            )
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if types.is_string(column.type) or types.is_large_string(column.type):
            return self.placed_text(column.cast("large_binary").to_pylist(), name)
        lengths: list[Array] = []
        if _holds_bytes(column.type):
            return self._pictures(table, name)
        while types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
            lengths.append(column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
            column = column.flatten()
        number = types.is_boolean(column.type) or types.is_integer(column.type) or types.is_floating(column.type)
        if not lengths or not number:
            raise SourceError(
                f"{self._location}: {name} is {table.schema.field(name).type}; fields are numbers, text or lists of "
                "numbers: save dates and decimals as numbers, and each part of a struct as a column"
            )
        if column.null_count:
            raise SourceError(f"{self._location}: lists in {name} have holes (null); fill them, or save NaN")
        return self._lists(column.to_numpy(zero_copy_only=False), lengths, name)

    def _pictures(self, table: Any, name: str) -> PlacedArray:
        """A column of image files as pixels, as the files have them: masks keep their numbers."""
        from hpcdl.data.sources.base.images import decode_mask

        path = self._work / f"gathered{len(list(self._work.glob('gathered*')))}"
        with GatheredArray(path, f"{self._location}: {name}", fixed=True) as gathered:
            for number, content in enumerate(_contents(table, name)):
                try:
                    gathered.add(decode_mask(content or b"", size=None), f"row {number}")
                except UnreadableSample as error:
                    raise SourceError(f"{self._location}: {name} of row {number}: {error}") from error
            return gathered.placed()

    def _lists(self, values: Array, lengths: list[Array], name: str) -> PlacedArray:
        """Flat values as samples: all of one shape, or of any length along the first axis."""
        inner = []
        for level in lengths[1:]:
            if len(level) and not (level == level[0]).all():
                raise SourceError(
                    f"{self._location}: lists in {name} differ in length within a sample; only the first axis may vary"
                )
            inner.append(int(level[0]) if len(level) else 0)
        outer = lengths[0]
        if len(outer) and (outer == outer[0]).all():
            return self.placed(values.reshape(len(outer), int(outer[0]), *inner))
        return self.placed(values.reshape(-1, *inner), np.concatenate([[0], np.cumsum(outer)]))

    def _image_column(self, table: Any) -> str | None:
        """The column of image files, where samples are images with a class."""
        spec = self._spec
        if spec.inputs or spec.targets or spec.target_kind == "regression":
            return None
        names = [spec.image_field] if spec.image_field else [*INPUT_NAMES, "img", *table.schema.names]
        for name in names:
            if name in table.schema.names and _holds_bytes(table.schema.field(name).type):
                first = next((one for one in _contents(table.slice(0, _ROWS), name) if one), b"")
                if is_image_head(first[:16]):
                    return name
        if spec.image_field:
            raise SourceError(
                f"{self._location}: the column {shown(spec.image_field)} holds no image files; "
                f"it has {', '.join(map(shown, table.schema.names[:20]))}"
            )
        return None

    def _list_images(self, tables: dict[str, Any], image: str, index: IndexWriter) -> SourceFacts:
        """Unpack the image files into the work folder, and list them with their labels."""
        schema = next(iter(tables.values())).schema
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
            labels = table.column(label).to_pylist()
            path = self._work / f"images.{split}"
            places = []
            with path.open("wb") as file:
                for number, content in enumerate(_contents(table, image)):
                    if content is None:
                        raise SourceError(f"{self._location}: {image} of row {number} has no bytes (null)")
                    places.append((file.tell(), len(content)))
                    file.write(content)
            listed.add_file(split, path, [(*place, own) for place, own in zip(places, labels, strict=True)])
        return listed.facts(_class_names(schema, label))


def _holds_bytes(kind: Any) -> bool:
    types = _pyarrow()[0].types
    if types.is_struct(kind):
        return "bytes" in [kind.field(number).name for number in range(kind.num_fields)]
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _contents(table: Any, name: str) -> Iterator[bytes | None]:
    for batch in table.select([name]).to_batches(max_chunksize=_ROWS):
        for value in batch.column(0).to_pylist():
            yield value["bytes"] if isinstance(value, dict) else value


def _class_names(schema: Any, label: str) -> list[str]:
    """Names that Hugging Face's data sets keep of a column's classes; none where they do not."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        names = features[label]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError("Parquet needs the package pyarrow; pip install 'hpcdl[parquet]'") from None
    return pyarrow, pyarrow.parquet

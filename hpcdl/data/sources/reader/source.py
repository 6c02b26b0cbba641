"""Source of a user's own reader: consecutive samples, or items that any process can read again.

Listing reads every sample once. Samples of a generator are stored in the work folder until the shards are written. For
items only small values are stored: each item is read again when its shard is written, and must be unchanged. Child
processes help to read items if that pays.

The reader is FILE.py:NAME, the user's own code. It runs only if the command line names it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, UnknownNameError, UsageError, failure, shown
from hpcdl.core.progress import progress
from hpcdl.core.storage.files import read_bytes
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources.base.chosen import field_name
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray, shape_text
from hpcdl.data.sources.base.source import (
    Array,
    Index,
    IndexWriter,
    SourceChanged,
    SourceFacts,
    SourceSpec,
    UnreadableSample,
)
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.reader.processes import OTHERS_FROM_S, TELLING_S, Found, ItemsLeft, read_items, serve
from hpcdl.data.sources.reader.samples import (
    RETURNS,
    SampleStream,
    UnfitSample,
    UserSample,
    Value,
    sample_of,
    streams_of,
)
from hpcdl.data.sources.reader.spool import (
    DIRECT,
    NotedSample,
    SampleSpool,
    SpooledItems,
    digest_of,
    fitting,
    noted,
    small_values,
)

FORM = "--reader FILE.py:NAME, a function or class that is called with the path of SOURCE"


@dataclass(frozen=True, kw_only=True)
class UserReader:
    """The reader that --reader names: `content` is the code that runs, `digest` its SHA-256."""

    spec: str
    path: Path
    name: str
    content: bytes
    digest: str

    def called(self, source: Path) -> Any:
        """Return what the function or class returns for `source`; SourceError names the line that fails."""
        module = ModuleType(f"hpcdl_user_reader_{self.path.stem}")
        module.__file__ = str(self.path.absolute())
        sys.modules[module.__name__] = module  # as an import does: classes in the file look up their module here
        with self.running():
            # The bytes whose digest is recorded, not the file, which may change meanwhile.
            exec(compile(self.content, str(self.path), "exec"), vars(module))
        function = getattr(module, self.name, None)
        if function is None:
            names = [
                name for name, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
            ]
            raise UnknownNameError(f"name in the reader {self.path}:", self.name, names)
        if not callable(function):
            raise UsageError(f"reader {self.spec} is not a function but {type(function).__name__}; give {FORM}")
        with self.running():
            return function(source)

    @contextmanager
    def running(self, what: str = "") -> Iterator[None]:
        """Run the user's code in this context, on `what`: it prints to stderr; errors become one line with a place."""
        try:
            with redirect_stdout(sys.stderr):  # stdout is for --json, and for the reports of writing processes
                yield
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise SourceError(f"reader {self.spec}{what and f', {what}'} {failure(error, str(self.path))}") from error


def user_reader(spec: str) -> UserReader:
    """Return the reader that `spec` names, its file read but not run; UsageError if there is none."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"--reader {shown(spec)} is not understood; give {FORM}")
    path = Path(file).expanduser()
    try:
        content = read_bytes(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--reader {shown(spec)}: cannot read {shown(file)}: {why}; give {FORM}") from error
    return UserReader(spec=spec, path=path, name=name, content=content, digest=hashlib.sha256(content).hexdigest())


_END = object()
_SPLIT_ORDER = ("train", "val", "test")


class ReaderSource(FieldSource):
    """Runs the reader named on the command line on SOURCE."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._streams: dict[str, SampleStream] = {}
        self._spools: dict[str, SampleSpool] = {}
        self._roles: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._order: list[str] = []
        self._skipped: list[str] = []
        self._items: dict[str, SpooledItems] = {}
        self._keep: frozenset[str] | None = None

    @staticmethod
    def recognises(location: Path) -> bool:
        """Return False: a reader runs only if --reader names it."""
        return False

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read every sample of the reader, and list them."""
        self._check_flags()
        self._run()
        again = {stream.items is not None for stream in self._streams.values()}
        if len(again) > 1:
            raise SourceError(f"reader {self._spec.reader}: some of its splits have items, others not; make them alike")
        try:
            for name, stream in self._streams.items():
                # Closed after an error too, which ends the processes that read.
                with closing(self._taken(name, stream)) as noted_samples:
                    for sample, origin, sample_name in noted_samples:
                        self._add(sample, origin, sample_name, again=again == {True})
        finally:
            for spool in self._spools.values():
                spool.close()
        if not self._spools:
            raise SourceError(f"reader {self._spec.reader} gives no samples of {self._location}; {RETURNS}")
        self._name_roles()
        names = [*(split_name for split_name in _SPLIT_ORDER if split_name in self._spools), *self._spools]
        spools = {name: self._spools[name] for name in names}
        facts = self.list_parts([self._group(name, spool) for name, spool in spools.items()], index)
        for spool in spools.values():
            index.include(spool.checksum())
        # Each field was placed once for each split.
        keys = self._order[:: len(spools)]
        return dataclasses.replace(
            _with_class_names(facts, keys, next(iter(self._streams.values())).class_names),
            files=[*keys, *(str(spool.path) for spool in spools.values())],
            skipped=self._skipped,
        )

    def read_fields_block(self, rows: Any, facts: SourceFacts, dtypes: Sequence[str]) -> list[Array] | None:
        """Return None: each sample is checked against its checksum."""
        return None

    def read_fields(self, row: Any, facts: SourceFacts) -> Sequence[Array]:
        """Return the fields of a sample: small ones from the work folder, the others read again."""
        count, part = len(facts.fields), int(row["file"])
        array_places = facts.arrays[part * count : (part + 1) * count]
        direct = [array_place.file.endswith(DIRECT) for array_place in array_places]
        if not any(direct):
            return super().read_fields(row, facts)
        values = self._again(facts.files[count + part], int(row["place"]))
        # Classes are stored as numbers, but the reader may return their names.
        stored_fields = self._kept_fields(row, facts, direct)
        return [
            fitting(values[key], tuple(field.shape)) if again else stored_field
            for key, field, again, stored_field in zip(facts.files, facts.fields, direct, stored_fields, strict=False)
        ]

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the item of a sample, or its number."""
        path = facts.files[len(facts.fields) + int(row["file"])]
        if Path(path).stat().st_size:
            return _item_name(self._listed(path).origin(int(row["place"]))[1])
        return f"sample {int(row['place'])}"

    def divided(self, parts: Sequence[ArrayGroup], remarks: list[str]) -> list[ArrayGroup]:
        """Return the parts unchanged: names of a sample's values do not say splits."""
        return list(parts)

    def not_finite(self, field: Field, array: PlacedArray) -> Array:
        """Return whether a value of each sample is NaN or infinity; as noted while listing if it is not stored."""
        if array.path.name.endswith(DIRECT):
            return np.fromfile(array.path, np.bool_)
        return super().not_finite(field, array)

    def as_fed(self, field: Field, arrays: Sequence[PlacedArray]) -> str:
        """Describe how training changes a field's numbers; if they are not stored, by their type only."""
        if not any(array.path.name.endswith(DIRECT) for array in arrays) or field.dtype == "uint8":
            return super().as_fed(field, arrays)
        wide = not np.can_cast(field.dtype, np.float32)
        return f"{field.name}: {field.dtype}, which training rounds to float32" if wide else ""

    @functools.cached_property
    def _reader(self) -> UserReader:
        if not self._spec.reader:
            raise UsageError(f"--format reader needs {FORM}")
        reader = user_reader(self._spec.reader)
        if reader.digest != self._spec.reader_digest:
            raise SourceChanged(f"the reader {reader.path} changed while it was used; run the same command again")
        return reader

    def _check_flags(self) -> None:
        spec = self._spec
        flag_values = {"--image-field": spec.image_field, "--label-field": spec.label_field}
        wrong = next((flag for flag, value in flag_values.items() if value is not None), "")
        if wrong or spec.axes != "auto":
            raise UsageError(
                f"{wrong or '--axes'} is not supported with --reader; the reader gives arrays as they shall be"
            )

    def _run(self) -> None:
        """Call the reader, and interpret what it returns."""
        returned = self._reader.called(self._location)
        try:
            with self._reader.running():
                self._streams = streams_of(returned)
        except SourceError as error:
            raise self._unfit(error) from error

    def _taken(self, name: str, stream: SampleStream) -> Generator[tuple[NotedSample, tuple[str, Any], str]]:
        """Yield the samples of a stream, their origins, and their names in messages."""
        if stream.items is None:
            samples = iter(stream.samples)
            number = 0
            while True:
                with self._reader.running(f"sample {number}"):
                    thing = next(samples, _END)
                if thing is _END:
                    return
                # A generator gives each sample once, so that all of its values are kept.
                yield noted(self._understood(thing, f"sample {number}"), None), (name, number), f"sample {number}"
                number += 1
        with self._reader.running("items()"):
            items = list(stream.items)
        with progress("reading with the reader", len(items)) as bar, closing(self._found(name, items)) as every:
            for number, (item, sample_or_error) in enumerate(zip(items, every, strict=True)):
                bar.update(number)
                if isinstance(sample_or_error, NotedSample):
                    yield sample_or_error, (name, item), _item_name(item)
                elif self._spec.checks:
                    raise SourceError(f"{sample_or_error} (--on-error skip leaves such items out)") from sample_or_error
                else:
                    self._skipped.append(_item_name(item))

    def _found(self, name: str, items: Sequence[Any]) -> Generator[Found]:
        """Yield the result for each item, read here and, if the rest takes long, in child processes."""
        began = 0.0
        for number, item in enumerate(items):
            passed_s, num_left = time.monotonic() - began, len(items) - number
            # The first item also includes the start of libraries.
            item_s = passed_s / (number - 1) if number > 1 and passed_s > TELLING_S else 0.0
            if self._keep is not None and self._spec.workers > 1 and item_s * num_left > OTHERS_FROM_S:
                reader_command = (self._spec.reader, self._spec.reader_digest, self._spec.location)
                items_left = ItemsLeft(stream=name, items=items[number:], item_s=item_s, keep=self._keep)
                yield from read_items(reader_command, items_left, min(self._spec.workers, num_left))
                return
            try:
                yield self.noted(name, item, self._keep)
            except SourceError as error:
                yield error
            began = began or time.monotonic()

    def noted(self, name: str, item: Any, keep: Collection[str] | None) -> NotedSample:
        """Return what listing needs of an item of the stream `name`; SourceError if it cannot be read.

        `keep` names the values whose bytes are kept; if None, the first sample decides.
        """
        if not self._streams:
            self._run()
        sample = self._understood(self._read(self._streams[name], item), _item_name(item))
        if keep is None:
            keep = self._keep = small_values(sample)
        return noted(sample, keep)

    def _read(self, stream: SampleStream, item: Any) -> Any:
        assert stream.read is not None
        with self._reader.running(_item_name(item)):
            return stream.read(item)

    def _understood(self, thing: Any, where: str) -> UserSample:
        try:
            return sample_of(thing)
        except UnfitSample as error:
            raise SourceError(f"reader {self._spec.reader}, {where}: {error}") from error

    def _unfit(self, error: SourceError) -> SourceError:
        """Return the error of an UnfitSample with its own text; other errors keep the line in which they arose."""
        cause = error.__cause__
        return SourceError(f"reader {self._spec.reader}: {cause}") if isinstance(cause, UnfitSample) else error

    def _add(self, sample: NotedSample, origin: tuple[str, Any], where: str, *, again: bool) -> None:
        split = origin[0] if origin[0] != UNSPLIT else sample.split
        if not self._spools:
            self._roles = sample.roles
        try:
            if origin[0] != UNSPLIT != sample.split:
                raise UnfitSample("it has a split of its own, and the reader has returned splits; keep one of them")
            if self._spools and (split == UNSPLIT) != (UNSPLIT in self._spools):
                raise UnfitSample("some samples have a split, others not; give all of them one, or none")
            if sample.roles != self._roles:
                raise UnfitSample("its inputs and targets have other names than those of the samples before")
            if split not in self._spools:
                self._spools[split] = SampleSpool(Path(self._spec.work), again=again)
            self._spools[split].add(sample, origin)
        except UnfitSample as error:
            raise SourceError(f"reader {self._spec.reader}, {where}: {error}") from error

    def _name_roles(self) -> None:
        """Take inputs and targets from the reader, unless flags name them."""
        if self._roles is None:
            return
        self.inputs = self.inputs or [f"{name}={field_name(name)}" for name in self._roles[0]]
        self.targets = self.targets or [f"{name}={field_name(name)}" for name in self._roles[1]]

    def _group(self, split: str, spool: SampleSpool) -> ArrayGroup:
        def found(name: str, array: PlacedArray) -> PlacedArray:
            self._order.append(name)
            return array

        return ArrayGroup(
            split=split,
            arrays={
                name: FoundArray(
                    "text" if array.text else shape_text(array.shape, array.dtype.name),
                    functools.partial(found, name, array),
                )
                for name, array in spool.placed().items()
            },
        )

    def _listed(self, path: str) -> SpooledItems:
        if path not in self._items:
            self._items[path] = SpooledItems(path)
        return self._items[path]

    def _again(self, path: str, number: int) -> Mapping[str, Value]:
        """Read the item of a sample again; SourceChanged if it has changed."""
        if not self._streams:
            self._run()
        spooled_items = self._listed(path)
        name, item = spooled_items.origin(number)
        try:
            values = self._understood(self._read(self._streams[name], item), _item_name(item)).values
        except SourceError as error:
            raise UnreadableSample(str(error)) from error
        # Listing has checked other values, and classes were numbered by them.
        if digest_of(values) != spooled_items.digest(number):
            raise SourceChanged(
                f"reader {self._spec.reader}, {_item_name(item)}: its values are not those of a moment ago; a reader "
                "gives the same for an item each time (no random numbers), and its files must not change"
            )
        return values

    def _kept_fields(self, row: Any, facts: SourceFacts, direct: Sequence[bool]) -> Sequence[Array]:
        """Return the stored fields, with an empty array in place of each of the others, which are not read."""
        count, part = len(facts.fields), int(row["file"])
        stored_numbers = [number for number in range(count) if not direct[number]]
        chosen = dataclasses.replace(
            facts,
            fields=[facts.fields[number] for number in stored_numbers],
            arrays=[facts.arrays[part * count + number] for number in stored_numbers],
            stamps=[facts.stamps[part * count + number] for number in stored_numbers],
        )
        row_of_chosen = row.copy()
        row_of_chosen["file"] = 0
        stored_fields = iter(super().read_fields(row_of_chosen, chosen) if stored_numbers else [])
        return [np.empty(0) if again else next(stored_fields) for again in direct]


def _item_name(item: Any) -> str:
    return f"item {shown(str(item) if isinstance(item, Path) else item)}"


def _with_class_names(facts: SourceFacts, keys: Sequence[str], known: Mapping[str, Sequence[str]]) -> SourceFacts:
    """Return `facts` with the class names that the data set stores."""
    fields = list(facts.fields)
    for number, (key, field) in enumerate(zip(keys, facts.fields, strict=True)):
        names = known.get(key, ())
        if field.kind != "class" or not names or len(field.class_names) > len(names):
            continue
        if field.class_names == [str(word) for word in range(len(field.class_names))]:
            fields[number] = dataclasses.replace(field, class_names=list(names))
        elif all(word.isdigit() and int(word) < len(names) for word in field.class_names):
            fields[number] = dataclasses.replace(field, class_names=[names[int(word)] for word in field.class_names])
    labels = [field for field in fields if field.role == "target" and field.kind == "class"]
    return dataclasses.replace(
        facts, fields=fields, class_names=labels[0].class_names if len(labels) == 1 else facts.class_names
    )


def main() -> None:
    """Read items for the process that lists them."""
    spec, digest, location, parent = sys.argv[1:]
    source = ReaderSource(SourceSpec(format="reader", location=location, reader=spec, reader_digest=digest))
    serve(source.noted, int(parent))


if __name__ == "__main__":
    main()

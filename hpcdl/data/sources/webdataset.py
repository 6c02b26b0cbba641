"""WebDataset archives: members of a .tar with the same name up to the first dot form one sample."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import lzma
import shlex
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.chosen import TARGET_NAMES, field_name, remarks_on_unused
from hpcdl.data.sources.base.labels import NUMBER, spellings
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray
from hpcdl.data.sources.base.source import Array, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import is_clutter, member_splits, some
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.layouts.flat import (
    EncodedFiles,
    FlatFiles,
    files_by_split,
    is_made_of,
    remarks_on_files,
    stamp_of,
)
from hpcdl.data.sources.layouts.gathered import GatheredArray

_LOOKED_INTO = 50
_PIECE_BYTES = 1 << 20
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_ARCHIVES = (".tar", *_PACKED)
_IMAGES = ("jpg", "jpeg", "png", "gif", "bmp", "tif", "tiff", "webp")
_NUMBERS = ("cls", "cls2", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript")
_KNOWN = (*_IMAGES, *_TEXTS, *_NUMBERS, "npy", "json")


@dataclass(frozen=True, kw_only=True)
class _Member:
    """The position of a member's bytes."""

    path: Path
    stamp: int
    offset: int
    size: int


@dataclass(kw_only=True)
class _Sample:
    """One sample: its name, and its members by their ending (everything after the first dot)."""

    name: str
    path: Path
    members: dict[str, _Member] = field(default_factory=dict)


class WebDatasetSource(FieldSource):
    """A .tar file or a folder of them; names such as train*, val*, test* make splits if all archives have one."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._files = FlatFiles()

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept files called *.tar, compressed or not."""
        return is_made_of(location, _ARCHIVES)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the members of every archive; JSON and labels are read."""
        archives = files_by_split(self._location, _ARCHIVES, self._spec)
        if not archives:
            raise SourceError(f"{self._location} holds no .tar archives")
        facts = self._listed(archives, index)
        remarks = remarks_on_files(self._location, _ARCHIVES)
        return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks]) if remarks else facts

    def _listed(self, archives: Mapping[str, list[Path]], index: IndexWriter) -> SourceFacts:
        parts = {split: [sample for path in paths for sample in _samples(path)] for split, paths in archives.items()}
        parts = self._divided(parts)
        self.sample_names = {split: [sample.name for sample in samples] for split, samples in parts.items()}
        if not any(
            _suffix(name) in _KNOWN for samples in parts.values() for sample in samples for name in sample.members
        ):
            raise SourceError(
                f"{self._location}: the archives hold no samples; members are called NAME.jpg, NAME.cls. Of another "
                f"data set unpack them (tar -xf) and give the folder{_inside(next(iter(archives.values()))[0])}"
            )
        if self._spec.target_kind == "regression" and self._spec.label_field and not self.targets:
            self.targets = (f"{self._spec.label_field}={field_name(self._spec.label_field)}",)
        elif not (self._spec.inputs or self._spec.targets or self._spec.target_kind == "regression"):
            images = [_image_of(sample, self._spec) for samples in parts.values() for sample in samples]
            if all(images):
                return self._list_images(parts, index)
            if self._spec.image_field:
                raise SourceError(
                    f"{self._location}: not every sample has an image .{self._spec.image_field}; it has members "
                    f"{_suffixes(parts)}"
                )
            if all({*sample.members} <= {*_IMAGES} for samples in parts.values() for sample in samples):
                raise SourceError(
                    f"{self._location}: its members are pictures alone, without a .cls or .json each. Where folders "
                    "are the classes, unpack it (tar -xf) and give the folder"
                )
        return self.list_parts(self._groups(parts), index)

    def _divided(self, parts: dict[str, list[_Sample]]) -> dict[str, list[_Sample]]:
        """Divide undivided `parts` by the folders train, test, ... in their members' names."""
        if list(parts) != [UNSPLIT]:
            return parts
        by_split: dict[str, list[_Sample]] = {}
        samples = parts[UNSPLIT]
        for sample, split in zip(samples, member_splits([sample.name for sample in samples], self._spec), strict=True):
            by_split.setdefault(split or UNSPLIT, []).append(sample)
        return by_split

    def _list_images(self, parts: Mapping[str, Sequence[_Sample]], index: IndexWriter) -> SourceFacts:
        listed = EncodedFiles(index, self._spec)
        labels = {split: [self._label(sample, parts) for sample in samples] for split, samples in parts.items()}
        texts = {label for own in labels.values() for label in own if isinstance(label, _Text)}
        written = self._spellings(texts)
        for split, samples in parts.items():
            by_path: dict[Path, list[tuple[int, int, Any]]] = {}
            for sample, label in zip(samples, labels[split], strict=True):
                image = _image_of(sample, self._spec)
                assert image is not None
                # JSON itself tells numbers from text; a member of text may spell a number.
                own = _number(label) if written is not None and isinstance(label, _Text) else label
                by_path.setdefault(sample.path, []).append((image.offset, image.size, own))
            for path, places in by_path.items():
                listed.add_file(split, path, places)
        facts = listed.facts()
        unused = self._beside(parts)
        self.named.update(unused)
        facts = dataclasses.replace(facts, remarks=[*facts.remarks, *remarks_on_unused(unused, self._spec)])
        if not written:
            return facts
        return dataclasses.replace(facts, class_names=[written.get(int(name), name) for name in facts.class_names])

    def _beside(self, parts: Mapping[str, Sequence[_Sample]]) -> list[str]:
        """Return the endings of members that are neither image nor class; of JSON the keys in one sample."""
        holders = {suffix: sample for samples in parts.values() for sample in samples for suffix in sample.members}
        label = self._spec.label_field or ("cls" if "cls" in holders else "json")
        label_suffix, _, key = label.partition("/")
        unused: list[str] = []
        for suffix, sample in sorted(holders.items()):
            if suffix == self._spec.image_field or (suffix in _IMAGES and not self._spec.image_field):
                continue
            if _suffix(suffix) != "json":
                unused += [suffix] if suffix != label_suffix else []
                continue
            with contextlib.suppress(SourceError):  # JSON that nobody needs may be of any kind
                document = self._json(sample, suffix)
                own = key or next((name for name in (*TARGET_NAMES, "cls") if name in document), "")
                used = own if suffix == label_suffix else ""
                unused += [f"{_called(suffix)}/{name}" for name in document if name != used]
        return unused

    def _spellings(self, texts: Iterable[str]) -> dict[int, str] | None:
        """Return how labels spell integers with leading zeros (007), by number; None if labels must stay text."""
        if not all(map(_is_whole, texts)):
            return {}
        return spellings(texts, self._spec.target_kind, str(self._location))

    def _label(self, sample: _Sample, parts: Mapping[str, Sequence[_Sample]]) -> Any:
        """Return the class of an image: a number, or a name."""
        flag_value = self._spec.label_field or ("cls" if "cls" in sample.members else "json")
        suffix, _, key = flag_value.partition("/")
        if suffix not in sample.members:
            raise SourceError(
                f"{_shown(sample)} has no .{suffix} with its class; give --label-field, one of {_suffixes(parts)} "
                "or json/KEY; where folders are the classes, unpack it (tar -xf) and give the folder"
            )
        if suffix.rpartition(".")[2] != "json":
            return _Text(self._text(sample, suffix).strip())
        document = self._json(sample, suffix)
        keys = [key] if key else [name for name in (*TARGET_NAMES, "cls") if name in document]
        if not keys or keys[0] not in document:
            raise SourceError(
                f"{_shown(sample)}: its .json has no {shown(key or 'label')}; give --label-field json/KEY, KEY one of "
                f"{', '.join(map(shown, list(document)[:20]))}"
            )
        return document[keys[0]]

    def _groups(self, parts: Mapping[str, Sequence[_Sample]]) -> list[ArrayGroup]:
        """Return the members of samples as arrays, each named by its ending (x.npy: x), and JSON values by key."""
        first = next(sample for samples in parts.values() for sample in samples)
        places: dict[str, tuple[str, str]] = {}
        for suffix in sorted({name for samples in parts.values() for sample in samples for name in sample.members}):
            if suffix.rpartition(".")[2] == "json" and suffix in first.members:
                places |= {f"{_called(suffix)}/{key}": (suffix, key) for key in self._json(first, suffix)}
            else:
                path = _called(suffix)
                places[path if path not in places else suffix] = (suffix, "")
        self._guess(places)
        called = self._called_as(places, [sample for samples in parts.values() for sample in samples])
        groups = []
        for split, samples in parts.items():
            arrays = {
                path: FoundArray(
                    f".{suffix}", functools.partial(self._gathered, samples, suffix, key, called.get(path, {}), path)
                )
                for path, (suffix, key) in places.items()
            }
            groups.append(ArrayGroup(split=split, arrays=arrays))
        return groups

    def _guess(self, places: Mapping[str, tuple[str, str]]) -> None:
        """Choose inputs and targets whose endings tell their use; requested endings are replaced by array names."""
        called = {suffix: path for path, (suffix, key) in places.items() if not key}
        self.inputs, self.targets = (
            [_renamed(flag_value, called) for flag_value in flag_values] for flag_values in (self.inputs, self.targets)
        )
        if not self.targets and "cls" in places:
            self.targets = ("cls=label",)
        if self.inputs or not self.targets:
            return
        taken = [flag_value.rpartition("=")[0] or flag_value for flag_value in self.targets]
        kinds = (*_IMAGES, *_TEXTS, "npy")
        candidates = [path for suffix, path in called.items() if path not in taken and _suffix(suffix) in kinds]
        if len(candidates) == 1:
            self.inputs = (candidates[0],)

    def _called_as(
        self, places: Mapping[str, tuple[str, str]], samples: Sequence[_Sample]
    ) -> dict[str, dict[int, str] | None]:
        """Return the spelling of integer labels in separate members, by the name of the target array."""
        targets = {flag_value.rpartition("=")[0] or flag_value for flag_value in self.targets}
        if self._spec.target_kind == "regression":
            return {}
        return {
            path: self._spellings({self._text(sample, suffix).strip() for sample in samples})
            for path, (suffix, _) in places.items()
            if path in targets and _suffix(suffix) in _NUMBERS
        }

    def _gathered(
        self, samples: Sequence[_Sample], suffix: str, key: str, called: dict[int, str] | None, name: str
    ) -> PlacedArray:
        """Return the values of members; `called` are the names of numbers, None if these must stay text."""
        path = self._work / f"gathered{len(list(self._work.glob('gathered*')))}"
        shown_as = f"{self._location}: .{suffix}{f' {key}' if key else ''}"
        with GatheredArray(path, shown_as) as gathered:
            if not key and _suffix(suffix) in _IMAGES:
                for sample in samples:
                    content = self._bytes(sample, suffix)
                    gathered.add_picture(content, _shown(sample), mask=name in self.masks, skips=not self._spec.checks)
                return gathered.placed()
            for sample, value in zip(samples, self._values(samples, suffix, key), strict=True):
                entry = self._text(sample, suffix).strip() if called is None else value
                gathered.add(entry, f"sample {shown(sample.name)}")
            return dataclasses.replace(gathered.placed(), called=called or {})

    def _values(self, samples: Sequence[_Sample], suffix: str, key: str) -> Iterator[Array | str | bytes]:
        if not key and _suffix(suffix) in _NUMBERS and self._spec.target_kind == "regression":
            words = [(sample, self._text(sample, suffix).strip()) for sample in samples]
            if any(not _is_whole(word) for _, word in words):
                yield from (_quantity(word, sample, suffix) for sample, word in words)
                return
        if not key:
            yield from (self._value(sample, suffix) for sample in samples)
            return
        values = [_plain(self._json(sample, suffix).get(key), sample, key) for sample in samples]
        kinds = {value.dtype for value in values if isinstance(value, np.ndarray)}
        common = np.result_type(*kinds) if kinds else None  # floats if any sample has one
        yield from (value.astype(common) if isinstance(value, np.ndarray) else value for value in values)

    def _value(self, sample: _Sample, suffix: str) -> Array | str | bytes:
        kind = _suffix(suffix)
        if kind in _TEXTS:
            return self._bytes(sample, suffix)
        if kind in _NUMBERS:
            text = self._text(sample, suffix).strip()
            if not _is_whole(text):
                quantity = "; for quantities give --target-kind regression" if NUMBER.fullmatch(text) else ""
                raise SourceError(
                    f"{_shown(sample)}: .{suffix} holds {shown(text)}; a whole number is needed{quantity}"
                )
            return np.array(int(text), np.int64)
        if kind == "npy":
            try:
                array: Array = np.load(io.BytesIO(self._bytes(sample, suffix)), allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                raise SourceError(
                    f"{_shown(sample)}: .{suffix} is no array of numbers: {' '.join(str(error).split())[:200]}"
                ) from error
            return array
        known = ", ".join(f".{suffix}" for suffix in ("npy", "json", *_TEXTS, *_NUMBERS))
        raise SourceError(f"{_shown(sample)}: .{suffix} is not taken; members are images, {known}")

    def _json(self, sample: _Sample, suffix: str) -> dict[str, Any]:
        try:
            document = json.loads(self._bytes(sample, suffix))
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{_shown(sample)}: .{suffix} is no JSON: {error}") from error
        if not isinstance(document, dict):
            raise SourceError(f"{_shown(sample)}: .{suffix} holds {shown(document)}; values by name are needed")
        return document

    def _text(self, sample: _Sample, suffix: str) -> str:
        try:
            return self._bytes(sample, suffix).decode()
        except UnicodeError as error:
            raise SourceError(f"{_shown(sample)}: .{suffix} is not UTF-8") from error

    def _bytes(self, sample: _Sample, suffix: str) -> bytes:
        if suffix not in sample.members:
            raise SourceError(f"{_shown(sample)} has no .{suffix}, which others have; every sample needs every field")
        member = sample.members[suffix]
        return bytes(self._files.read(str(member.path), member.stamp, member.offset, member.size))


def _samples(path: Path) -> list[_Sample]:
    """Return the samples of an archive, in its order."""
    if path.name.lower().endswith(_PACKED):
        _refuse_packed(path)
    samples: dict[str, _Sample] = {}
    stamp, size = stamp_of(path), path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                # The first dot of the last part of a name, as WebDataset has it: a.b/c.seg.png is c with .seg.png.
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if not member.isfile() or not stem or not suffix or _is_clutter(folder):
                    continue
                # Samples are read by offset and size: the bytes of a sparse member are not in one piece.
                if member.issparse() or member.offset_data + member.size > size:
                    raise SourceError(f"{path}: {shown(member.name)} is cut short, or a file with holes")
                sample = samples.setdefault(
                    f"{folder}/{stem}", _Sample(name=f"{folder}/{stem}".removeprefix("/").removeprefix("./"), path=path)
                )
                if (
                    sample.members.setdefault(
                        suffix.lower(), _Member(path=path, stamp=stamp, offset=member.offset_data, size=member.size)
                    ).offset
                    != member.offset_data
                ):
                    raise SourceError(f"{path} holds {shown(member.name)} twice; each member belongs to one sample")
            _check_end(path, archive.offset)
    except tarfile.TarError as error:
        raise SourceError(f"{path} is no .tar archive, or cut short: {error}") from error
    return list(samples.values())


def _check_end(path: Path, end: int) -> None:
    """Raise SourceError unless only zeros, a block or more, follow the last member: tarfile ignores other bytes."""
    with open_regular(path) as file:
        file.seek(end)
        length = 0
        while piece := file.read(_PIECE_BYTES):
            if any(piece):
                raise SourceError(
                    f"{path}: at byte {end} is no member, and more follows: is it damaged, or several archives that "
                    "were put together (cat)? Copy it again, or keep archives apart in one folder"
                )
            length += len(piece)
    if length < tarfile.BLOCKSIZE:
        raise SourceError(
            f"{path} is cut short: an archive ends with blocks of zeros, and this one has none; copy it again, or if "
            f"it was made so: truncate -s +1024 {shlex.quote(str(path))}"
        )


def _is_clutter(folder: str) -> bool:
    return any(is_clutter(part) for part in folder.split("/") if part not in ("", ".", ".."))


def _refuse_packed(path: Path) -> None:
    """Raise SourceError for a compressed archive, and say how to unpack it, depending on its content."""
    try:
        with tarfile.open(path, "r:*") as archive:
            names = [member.name for member in itertools.islice(archive, _LOOKED_INTO)]
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError):
        # A packing that Python cannot read (zstd), or damage: taken for samples, whose advice fits both.
        names = ["?.cls"]
    if any(_suffix(name).lower() in _KNOWN for name in names):
        raise SourceError(f"{path} is compressed; unpack it (gzip -d), so that samples can be read in place")
    raise SourceError(
        f"{path} holds {some(names[:3])}, no samples of WebDataset: unpack it (tar -xf) and give the folder"
    )


def _inside(path: Path) -> str:
    with tarfile.open(path, "r:") as archive:
        names = [member.name for member in itertools.islice(archive, 3)]
    return f" (it holds {some(names)})" if names else ""


def _image_of(sample: _Sample, spec: SourceSpec) -> _Member | None:
    """Return the image of a sample that consists only of an image and its class, apart from unrequested members."""
    if spec.image_field:
        return sample.members.get(spec.image_field)
    suffixes = [suffix for suffix in sample.members if _suffix(suffix) in (*_IMAGES, "npy")]
    labelled = bool(spec.label_field) or not sample.members.keys().isdisjoint(("cls", "json"))
    return sample.members[suffixes[0]] if len(suffixes) == 1 and suffixes[0] in _IMAGES and labelled else None


def _quantity(text: str, sample: _Sample, suffix: str) -> Array:
    """Return a quantity that is written as text."""
    if not NUMBER.fullmatch(text):
        raise SourceError(f"{_shown(sample)}: .{suffix} holds {shown(text)}; a number is needed")
    return np.array(float(text))


def _plain(value: Any, sample: _Sample, key: str) -> Array | str:
    """Return a JSON value as an array or text."""
    if isinstance(value, str):
        return value
    try:
        array = np.array(value)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "bif":
        raise SourceError(
            f"{_shown(sample)}: {shown(key)} is {shown(value)}; numbers, even lists of numbers, and text are taken"
        )
    return array


class _Text(str):
    """A label from a separate member, which may be a number; JSON values have types of their own."""


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _number(text: str) -> int | str:
    return int(text) if _is_whole(text) else str(text)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def _called(suffix: str) -> str:
    """Return the array name for members with an ending: `x` for .x.npy, otherwise the ending itself."""
    return suffix.rpartition(".")[0] or suffix


def _renamed(flag_value: str, called: Mapping[str, str]) -> str:
    suffix, equals, name = flag_value.rpartition("=")
    return f"{called.get(suffix, suffix)}={name}" if equals else called.get(flag_value, flag_value)


def _suffixes(parts: Mapping[str, Sequence[_Sample]]) -> str:
    return ", ".join(sorted({name for samples in parts.values() for sample in samples for name in sample.members})[:20])


def _shown(sample: _Sample) -> str:
    return f"sample {shown(sample.name)} of {sample.path.name}"

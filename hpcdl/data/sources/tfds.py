"""Folders prepared by TensorFlow Datasets: TFRecord files described by a features.json; read without TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.manifest import DTYPES
from hpcdl.data.sources.base.glance import is_image_head
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray
from hpcdl.data.sources.base.source import Array, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import SPLIT_WORDS
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.layouts.flat import EncodedFiles
from hpcdl.data.sources.layouts.gathered import GatheredArray
from hpcdl.data.sources.layouts.records import example_features, leave_out, records

_VERSION = re.compile(r"\d+\.\d+\.\d+")
_HEAD_BYTES = 12
"""The record's length and its checksum."""
_MOST_LISTED = 64
"""A folder with more entries is not searched for versions or variants of a data set."""

_File = tuple[Path, int]
"""A file and the number of records it should hold."""
_Record = tuple[str, int, bytes, Any]
"""A record's name for messages, its offset, content and features."""


@dataclass(frozen=True, kw_only=True)
class _Feature:
    """`kind` is `image`, `class`, `text` or `tensor`; for an unsupported feature it is a description."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    sequence: bool = False
    raw: bool = False
    names: Sequence[str] = ()


class TfdsSource(FieldSource):
    """The folder of a prepared version, or a folder above it that leads to only one."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._skipped: dict[str, None] | None = None if spec.checks else {}
        """Damaged records that --on-error skip leaves out, in order."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a folder with dataset_info.json and features.json, or with a version folder that has them."""
        return location.is_dir() and bool(_run_plan(location))

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read from every record the features that are needed."""
        return dataclasses.replace(self._listed(index), skipped=[*(self._skipped or ())])

    def _listed(self, index: IndexWriter) -> SourceFacts:
        folders = _run_plan(self._location) if self._location.is_dir() else []
        if len(folders) != 1:
            described_folders = ", ".join(str(folder.relative_to(self._location)) for folder in folders[:10])
            raise SourceError(
                f"{self._location} holds several prepared data sets: {described_folders}; give the folder of one"
                if folders
                else f"{self._location} holds no prepared data set: no features.json beside dataset_info.json"
            )
        (folder,) = folders
        info = _document(folder / "dataset_info.json")
        try:
            features = dict(_flattened(_document(folder / "features.json"), "", folder))
            splits = self._splits(folder, info)
            self._take_supervised(info, features)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SourceError(
                f"{folder}: features.json or dataset_info.json is not as TensorFlow Datasets writes it ({error}); "
                "prepare the data set again"
            ) from error
        if not self._spec.inputs and not self._spec.targets:
            kinds = [features[requests[0]].kind for requests in (self.inputs, self.targets) if len(requests) == 1]
            if kinds == ["image", "class"] and not features[self.inputs[0]].sequence:
                return self._list_images(splits, self.inputs[0], self.targets[0], features, index)
        groups = []
        for split, files in splits.items():
            arrays = {
                path: FoundArray(_remarks(feature), functools.partial(self._gathered, files, path, feature))
                for path, feature in features.items()
            }
            groups.append(ArrayGroup(split=split, arrays=arrays))
        return self.list_parts(groups, index)

    def _splits(self, folder: Path, info: Mapping[str, Any]) -> dict[str, list[_File]]:
        """Return the files of each split; SourceError unless all exist."""
        kind = info.get("fileFormat", "tfrecord")
        if kind != "tfrecord":
            raise SourceError(
                f"{folder} is prepared as {shown(kind)}; prepare it as TFRecord: builder.download_and_prepare("
                'file_format="tfrecord")'
            )
        files_of_split: dict[str, list[_File]] = {}
        for split in info.get("splits") or []:
            name = str(split.get("name"))
            lengths = [int(length) for length in split.get("shardLengths") or []]
            count = len(lengths)
            suffix = re.compile(rf".*-{re.escape(name)}\.tfrecord-\d+-of-0*{count}")
            paths = sorted(path for path in folder.iterdir() if suffix.fullmatch(path.name))
            if len(paths) != count:
                raise SourceError(
                    f"{folder}: the split {name} has {len(paths)} of the {count} files in dataset_info.json; "
                    "prepare it again"
                )
            # TFDS lists splits without samples too, and two of its names may mean one split.
            if sum(lengths):
                files_of_split.setdefault(SPLIT_WORDS.get(name, name), []).extend(zip(paths, lengths, strict=True))
        if not files_of_split:
            raise SourceError(f"{folder} holds no samples; prepare it again")
        return files_of_split

    def _take_supervised(self, info: Mapping[str, Any], features: Mapping[str, _Feature]) -> None:
        """Set inputs and targets as dataset_info.json says, or the only image and class, unless the user names them."""
        spec = self._spec
        items = ((info.get("supervisedKeys") or {}).get("tuple") or {}).get("items") or []
        keys = [item.get("featureKey") for item in items]
        # Not every data set has supervised keys.
        if len(keys) != 2 or not all(key in features for key in keys):
            keys = [_only(features, kind) for kind in ("image", "class")]
        if not self.inputs and (spec.image_field or keys[0]):
            self.inputs = (spec.image_field or keys[0],)
        if not self.targets and (spec.label_field or keys[1]):
            self.targets = (spec.label_field or keys[1],)
        for name in (spec.image_field, spec.label_field):
            if name and name not in features:
                raise SourceError(
                    f"{self._location} has no feature {shown(name)}; it has {', '.join(map(shown, features))}"
                )

    def _list_images(
        self,
        splits: Mapping[str, Sequence[_File]],
        image: str,
        label: str,
        features: Mapping[str, _Feature],
        index: IndexWriter,
    ) -> SourceFacts:
        """List images at their positions within the records."""
        encoded = EncodedFiles(index, self._spec)
        for split, file in ((split, file) for split, files in splits.items() for file in files):
            entries = []
            for record, offset, content, values in self._examples(file):
                (picture,) = _values(values, image, "bytes_list", record, 1)
                if not is_image_head(bytes(picture[:16])):
                    raise SourceError(f"{record}: {image} is no image file")
                (number,) = _values(values, label, "int64_list", record, 1)
                # Protobuf stores bytes unchanged, so that the image is read later without the rest of its record.
                entries.append((offset + _HEAD_BYTES + content.index(picture), len(picture), int(number)))
            encoded.add_file(split, file[0], entries)
        return encoded.facts(features[label].names)

    def _gathered(self, files: Sequence[_File], name: str, feature: _Feature) -> PlacedArray:
        if feature.kind not in _READERS:
            raise SourceError(f"{self._location}: {name} is {feature.kind}, which is not taken; name another feature")
        path = self._work / f"gathered{len(list(self._work.glob('gathered*')))}"
        read = _READERS[feature.kind]
        with GatheredArray(path, f"{self._location}: {name}") as gathered:
            for record, _, _, values in itertools.chain.from_iterable(map(self._examples, files)):
                if feature.kind == "image":
                    content = _text(values, name, feature, record)
                    # Decoded here: pixels are a field like others, and all must have one shape.
                    gathered.add_picture(content, record, mask=name in self.masks, skips=not self._spec.checks)
                else:
                    gathered.add(read(values, name, feature, record), record)
            return gathered.placed()

    def _examples(self, file: _File) -> Iterator[_Record]:
        """Yield the records of a file; SourceError for a damaged one, unless --on-error skip leaves it out."""
        path, length = file
        count = 0
        for number, (offset, content, sound) in enumerate(records(path)):
            count += 1
            record_name = f"record {number} of {path.name}"
            if sound:
                yield record_name, offset, content, example_features(content, record_name)
            else:
                leave_out(record_name, self._skipped, "prepare the data set again")
        if count != length:
            raise SourceError(f"{path} holds {count} records, and dataset_info.json states {length}; prepare it again")


def _values(features: Any, name: str, kind: str, where: str, count: int | None = None) -> Any:
    values = getattr(features[name], kind).value if name in features else ()
    if count is not None and len(values) != count:
        raise SourceError(f"{where}: {shown(name)} has {len(values)} values, and features.json states {count}")
    return values


def _tensor(features: Any, name: str, feature: _Feature, where: str) -> Array:
    """Return numbers in the shape of features.json; the first axis is free if its length is unknown."""
    dtype = np.dtype(feature.dtype)
    if feature.raw:
        values = np.frombuffer(_values(features, name, "bytes_list", where, 1)[0], dtype)
    else:
        kind = "float_list" if dtype.kind == "f" else "int64_list"
        values = np.array(_values(features, name, kind, where)).astype(dtype)
    shape = (-1, *feature.shape) if feature.sequence else feature.shape
    try:
        return values.reshape(shape)
    except ValueError as error:
        raise SourceError(
            f"{where}: {shown(name)} has {values.size} values, and features.json states the shape {feature.shape}"
        ) from error


def _text(features: Any, name: str, feature: _Feature, where: str) -> bytes:
    return bytes(_values(features, name, "bytes_list", where, 1)[0])


def _class(features: Any, name: str, feature: _Feature, where: str) -> Array | str:
    (number,) = _values(features, name, "int64_list", where, 1)
    # TFDS writes -1 for a label that is not known, as in test splits.
    return feature.names[number] if 0 <= number < len(feature.names) else np.array(number, np.int64)


_READERS: Mapping[str, Callable[[Any, str, _Feature, str], Array | bytes | str]] = {
    "tensor": _tensor,
    "text": _text,
    "class": _class,
    "image": _text,
}
"""The function that reads a feature's value from a record, by kind of feature; an image's are its file's bytes."""


def _flattened(document: Mapping[str, Any], path: str, folder: Path) -> Iterator[tuple[str, _Feature]]:
    """Yield the features of a features.json with their names in records."""
    name = str(document.get("pythonClassName", "")).rpartition(".")[2]
    if "featuresDict" in document:
        for key, inner in document["featuresDict"].get("features", {}).items():
            yield from _flattened(inner, f"{path}/{key}" if path else key, folder)
    elif name in ("Sequence", "Dataset") or "sequence" in document:
        for key, inner in _flattened((document.get("sequence") or {}).get("feature") or {}, path, folder):
            plain = inner.kind in ("tensor", "class") and not inner.sequence and not inner.raw
            dtype = inner.dtype or "int64"
            yield (
                key,
                (
                    _Feature(kind="tensor", dtype=dtype, shape=inner.shape, sequence=True)
                    if plain and -1 not in inner.shape
                    else _Feature(kind=f"a sequence of {inner.kind}")
                ),
            )
    elif name in ("Image", "LabeledImage"):
        yield path, _Feature(kind="image")
    elif name == "ClassLabel":
        yield path, _Feature(kind="class", dtype="int64", names=_names(document, path, folder))
    elif name == "Text":
        yield path, _Feature(kind="text")
    else:
        yield path, _tensor_feature(document, name)


def _tensor_feature(document: Mapping[str, Any], name: str) -> _Feature:
    tensor = document.get("tensor") or {}
    dtype = str(tensor.get("dtype", ""))
    encoding = str(tensor.get("encoding", "none")).lower()
    if dtype in ("string", "object") and name in ("Tensor", "Scalar"):
        return _Feature(kind="text" if not (tensor.get("shape") or {}).get("dimensions") else "an array of text")
    if dtype not in DTYPES or encoding not in ("none", "bytes", ""):
        return _Feature(kind=f"{name or 'unknown'} of {dtype or 'an unknown type'} ({encoding})")
    shape = tuple(int(side) for side in (tensor.get("shape") or {}).get("dimensions", []))
    # Only the first axis of a field may vary in length.
    if -1 in shape[1:]:
        return _Feature(kind=f"{name} of the shape {shape}")
    return _Feature(kind="tensor", dtype=dtype, shape=shape, raw=encoding == "bytes")


def _names(document: Mapping[str, Any], path: str, folder: Path) -> Sequence[str]:
    # TFDS's own name of that file, where a slash within a feature's name becomes a dash.
    file = folder / f"{path.replace('/', '-')}.labels.txt"
    count = int((document.get("classLabel") or {}).get("numClasses", 0))
    if file.is_file():
        lines = file.read_text("utf-8", "replace").splitlines()
        if len(lines) == count or not count:
            return lines
    return [str(number) for number in range(count)]


def _remarks(feature: _Feature) -> str:
    return feature.kind if feature.kind != "tensor" else f"{'x'.join(map(str, feature.shape)) or 'one'} {feature.dtype}"


def _only(features: Mapping[str, _Feature], kind: str) -> str | None:
    paths = [path for path, feature in features.items() if feature.kind == kind]
    return paths[0] if len(paths) == 1 else None


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise SourceError(f"{path} holds no JSON object; prepare the data set again")
    return document


def _run_plan(location: Path) -> list[Path]:
    """Return the folders of prepared versions at, or up to three levels below, `location`."""
    if _is_prepared(location):
        return [location]
    prepared_folders: list[Path] = []
    level = [location]
    for _ in range(3):
        level = [below for folder in level for below in _folders(folder)]
        prepared_folders += [folder for folder in level if _VERSION.fullmatch(folder.name) and _is_prepared(folder)]
        level = [folder for folder in level if not _VERSION.fullmatch(folder.name)]
    return sorted(prepared_folders)


def _is_prepared(folder: Path) -> bool:
    return (folder / "features.json").is_file() and (folder / "dataset_info.json").is_file()


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        first = list(itertools.islice(entries, _MOST_LISTED))
    if len(first) == _MOST_LISTED:
        return []
    return [Path(entry.path) for entry in first if entry.is_dir() and entry.name[0] != "."]

"""CIFAR-10 and CIFAR-100 as published by their authors, binary or python version (Krizhevsky 2009)."""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import SourceError
from hpcdl.core.storage.files import read_bytes
from hpcdl.data.sources.base.labels import class_numbers
from hpcdl.data.sources.base.source import Array, Index, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.layouts.flat import FlatFiles, add_numbered, stamp_of

_PIXELS = 3 * 32 * 32
_MOST_BYTES = 256 << 20
"""The largest published file has 184 MB."""


@dataclass(frozen=True, kw_only=True)
class _Version:
    """The names of one published version; labels are the last of `label_bytes`, or stored under `label_key`."""

    folders: tuple[str, ...]
    files: dict[str, str]
    names_file: str
    names_key: bytes = b""
    label_key: bytes = b""
    label_bytes: int = 1

    @property
    def pickled(self) -> bool:
        return bool(self.label_key)


_TEN = {f"data_batch_{number}": "train" for number in range(1, 6)} | {"test_batch": "test"}
_VERSIONS: dict[str, tuple[_Version, ...]] = {
    "cifar10": (
        _Version(
            folders=("cifar-10-batches-bin",),
            files={f"{name}.bin": split for name, split in _TEN.items()},
            names_file="batches.meta.txt",
        ),
        _Version(
            folders=("cifar-10-batches-py",),
            files=_TEN,
            names_file="batches.meta",
            names_key=b"label_names",
            label_key=b"labels",
        ),
    ),
    "cifar100": (
        _Version(
            folders=("cifar-100-binary",),
            files={"train.bin": "train", "test.bin": "test"},
            names_file="fine_label_names.txt",
            label_bytes=2,
        ),
        _Version(
            folders=("cifar-100-python",),
            files={"train": "train", "test": "test"},
            names_file="meta",
            names_key=b"fine_label_names",
            label_key=b"fine_labels",
        ),
    ),
}


class Cifar10Source:
    """CIFAR-10: the folder itself or the one above it; missing batch files are omitted."""

    name: ClassVar[str] = "cifar10"
    num_classes: ClassVar[int] = 10

    def __init__(self, spec: SourceSpec) -> None:
        self._root, self._work = Path(spec.location), Path(spec.work)
        self._files = FlatFiles()

    @classmethod
    def recognises(cls, location: Path) -> bool:
        """Accept a folder with the batch files."""
        return cls._find(location) is not None

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List every record; pickled batches are unpacked into the work folder."""
        batches = self._find(self._root)
        if batches is None:
            expected = " or ".join(next(iter(version.files)) for version in _VERSIONS[self.name])
            raise SourceError(
                f"{self._root} holds no {self.name} batches (such as {expected}); unpack the archive first"
            )
        folder, version = batches
        files: list[str] = []
        stamps: list[int] = []
        for name, split in version.files.items():
            path = folder / name
            if not path.is_file():
                continue
            labels, path = self._unpack(path, version) if version.pickled else self._records(path, version)
            add_numbered(index, split, len(files), labels)
            files.append(f"{0 if version.pickled else version.label_bytes}:{path}")
            stamps.append(stamp_of(path))
        return SourceFacts(
            class_names=self._names(folder, version),
            samples_are="pixels",
            sample_shape=(32, 32, 3),
            files=files,
            stamps=stamps,
        )

    def read(self, row: Any, facts: SourceFacts, index: Index) -> Array:
        """Return one image; a record stores one colour plane after another."""
        file = int(row["file"])
        before, _, path = facts.files[file].partition(":")
        record = int(before) + _PIXELS
        content = self._files.read(path, facts.stamps[file], int(row["place"]) * record + int(before), _PIXELS)
        return np.frombuffer(content, np.uint8).reshape(3, 32, 32).transpose(1, 2, 0)

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the number of the record and its file."""
        return f"record {int(row['place'])} of {Path(facts.files[int(row['file'])].partition(':')[2]).name}"

    @classmethod
    def _find(cls, location: Path) -> tuple[Path, _Version] | None:
        for version in _VERSIONS[cls.name]:
            for folder in (location, *(location / name for name in version.folders)):
                if any((folder / name).is_file() for name in version.files) and (folder / version.names_file).is_file():
                    return folder, version
        return None

    def _records(self, path: Path, version: _Version) -> tuple[npt.NDArray[np.int64], Path]:
        record = version.label_bytes + _PIXELS
        size = path.stat().st_size
        if size % record or not 0 < size <= _MOST_BYTES:
            raise SourceError(
                f"{path} has {size} bytes, no multiple of {record} up to {_MOST_BYTES}; it is cut short or no "
                f"{self.name} file"
            )
        content = np.memmap(path, np.uint8, "r")
        return content.reshape(-1, record)[:, version.label_bytes - 1].astype(np.int64), path

    def _unpack(self, path: Path, version: _Version) -> tuple[npt.NDArray[np.int64], Path]:
        batch = load_plain(path)
        data, labels = batch.get(b"data"), batch.get(version.label_key)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _PIXELS:
            raise SourceError(f"{path} holds no {self.name} batch: b'data' is not uint8 (N, {_PIXELS})")
        if (
            not isinstance(labels, list)
            or len(labels) != len(data)
            or not all(isinstance(label, int) and abs(label) < 2**63 for label in labels)
        ):
            raise SourceError(
                f"{path} holds no {self.name} batch: {version.label_key!r} is no list of {len(data)} numbers"
            )
        unpacked = self._work / f"{path.name}.pixels"
        data.tofile(unpacked)
        return np.array(labels, np.int64), unpacked

    def _names(self, folder: Path, version: _Version) -> list[str]:
        path = folder / version.names_file
        if version.pickled:
            names = load_plain(path).get(version.names_key)
            names = names if isinstance(names, list) else []
            class_names = [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names]
        else:
            text = read_bytes(path, _MOST_BYTES).decode("utf-8", "replace")
            class_names = [line.strip() for line in text.splitlines() if line.strip()]
        return class_names if len(class_names) == self.num_classes else class_numbers(self.num_classes)


class Cifar100Source(Cifar10Source):
    """CIFAR-100 with its fine labels."""

    name: ClassVar[str] = "cifar100"
    num_classes: ClassVar[int] = 100


class _PlainUnpickler(pickle._Unpickler):
    """Allows numbers, text, bytes, lists, dicts and numpy arrays; anything else could run code.

    This is the pure Python unpickler, because the C version allocates as many objects as a file claims to have.
    """

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }  # it also allocates as many bytes as the file claims

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}"[:100])
        return _ADMITTED[module, name]


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """Replacement for the function that Python 3 pickles call to write bytes for Python 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("it holds bytes of an unknown kind")
    return text.encode("latin1")


def _new_array(kind: object, shape: object, code: object) -> npt.NDArray[Any]:
    """Return an empty array for a numpy pickle to fill with its state; the file cannot choose its size."""
    return np.empty(0, np.uint8)


_ADMITTED: dict[tuple[str, str], Any] = {("_codecs", "encode"): _latin1_bytes}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy"):
    _ADMITTED |= {(_module, "_reconstruct"): _new_array, (_module, "ndarray"): "ndarray", (_module, "dtype"): np.dtype}


def load_plain(path: Path) -> dict[bytes, Any]:
    """Return the dict in a pickled file; SourceError if it contains more than plain values and numpy arrays."""
    content = io.BytesIO(read_bytes(path, _MOST_BYTES))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's warnings about old pickles
            # Python 2 wrote these files: its strings are the bytes of pixels, and no text.
            document = _PlainUnpickler(content, encoding="bytes").load()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise SourceError(f"{path} is refused: {reason}; a CIFAR file holds plain lists and arrays only") from error
    if not isinstance(document, dict):
        raise SourceError(f"{path} is refused: it holds a {type(document).__name__}, a CIFAR file a dict")
    return document

"""Saved Keras models from untrusted sources: sizes and layers are checked before Keras reads them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import h5py

from hpcdl.core.errors import cause, shown
from hpcdl.core.storage.archives import (
    FLOOR_BYTES,
    bounded,
    check_fits_memory,
    check_unpacked,
    checked_members,
    pieces,
    place_of,
)
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import format_bytes

if TYPE_CHECKING:
    import keras

CODE = {
    "Lambda": "it runs Python code from the file",
    "__lambda__": "it runs Python code from the file",
    "TorchModuleWrapper": "it unpickles a PyTorch module from the file, which runs code",
    "TFSMLayer": "it runs a TensorFlow SavedModel that the file names",
    "JaxLayer": "it runs a function that the file names",
    "FlaxLayer": "it runs a module that the file names",
}
"""Keras classes that run code contained in or named by a saved model, by the last part of their name."""
_TRUSTED = ("keras", "keras_hub", "keras_cv", "keras_nlp", "builtins")
"""Packages that a saved model may name; loading would import others, whose classes the user must register."""
_MODELING = re.compile(r"keras(?!\.(src\.)?(utils|saving|config|datasets|export|models\.(clone|load)))")
"""Keras modules that build models: functions of its other modules download, write or unpack files."""
_CONFIG, _WEIGHTS = "config.json", ".weights.h5"
_MOST_VARIABLES = 4
"""Largest ratio of bytes of a model's variables to those of the file's arrays: types differ."""
_MOST_CONFIG_BYTES = 64 << 20
_DEFLATE = h5py.h5z.FILTER_DEFLATE
# 32000 is LZF's number in HDF5's registry of filters.
_FILTERS = {
    h5py.h5z.FILTER_SHUFFLE: "shuffle", _DEFLATE: "gzip", h5py.h5z.FILTER_FLETCHER32: "fletcher32", 32000: "lzf",
}  # fmt: skip
"""HDF5 filters whose output is limited by the checks in `_check_chunks`."""
_CHUNK_ROOM = 1.1, 4096
"""Factor and bytes by which an incompressible chunk may exceed its values."""
_DAMAGED = (
    OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError, NotImplementedError,
    OverflowError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What readers raise for damaged files; RecursionError is a RuntimeError."""


class OwnCode(ValueError):
    """A saved model names code that is neither Keras's nor registered in this process; the function has it."""


def load_saved(path: Path, custom_objects: Mapping[str, Any]) -> keras.Model:
    """Load a saved model without its optimizer; ValueError gives the reason in one line if that fails.

    It is OwnCode if the file names code that is not `custom_objects`' or registered.
    """
    import keras

    num_bytes = check_saved(path, {**keras.saving.get_custom_objects(), **custom_objects})
    try:
        with _counted(FLOOR_BYTES + _MOST_VARIABLES * num_bytes):
            return keras.saving.load_model(path, custom_objects=custom_objects, compile=False)
    except Exception as error:  # layers of any kind are built from the file's content
        raise ValueError(cause(error)) from error


def check_saved(path: Path, known: Mapping[str, Any] | None = None, *, code: bool = True) -> int:
    """Raise ValueError if a .keras or .h5 file would unpack to too much, or contains code; Keras is not called.

    `known` are further classes that the file may use, by registered name; None if they are not yet known. Without
    `code` only sizes are checked. Returns the number of bytes of arrays.
    """
    try:
        with open_regular(path) as file:
            # By content: Keras reads a zip archive under any name.
            is_zip = file.read(2) == b"PK"
            config, num_bytes = _look_at_zip(file) if is_zip else _look_at_hdf5(file, _size_of(file))
        if code and config is not None:
            document = json.loads(config)
            if isinstance(document, dict):
                document["compile_config"] = None  # as Keras does if no optimizer is wanted
            _check_classes(document, known)
    except OwnCode:
        raise
    except _DAMAGED as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    return num_bytes


def variable_class() -> Any:
    """Return the class of all variables of Keras: 3.5 exports a subclass of it, of which no layer has any."""
    import keras

    exported: Any = keras.Variable
    return exported.__mro__[1] if exported.__module__.endswith(".exports") else exported


@contextlib.contextmanager
def _counted(most_bytes: int) -> Iterator[None]:
    """Refuse to build models of more than `most_bytes` inside: a short config can ask for any number of weights."""
    kind = variable_class()
    plain, total = kind.__init__, 0

    @functools.wraps(plain)
    def counting(self: Any, initializer: Any, shape: Any = None, dtype: Any = None, *more: Any, **named: Any) -> None:
        nonlocal total
        total += math.prod(shape or ()) * _bytes_of(dtype)
        if total > most_bytes:
            raise ValueError(
                f"its layers would take {format_bytes(total)} or more, and the file holds too few weights for them"
            )
        plain(self, initializer, shape, dtype, *more, **named)

    has_own_init = "__init__" in vars(kind)
    kind.__init__ = counting
    try:
        yield
    finally:
        if has_own_init:
            kind.__init__ = plain
        else:
            del kind.__init__  # it was inherited: assigning it would leave a copy in this class


def _bytes_of(dtype: Any) -> int:
    # The first number of a type's name is its bits: bfloat16, float8_e4m3fn.
    match = re.search(r"\d+", str(dtype))
    return max(1, int(match[0]) // 8) if match else 4


def _size_of(file: IO[bytes]) -> int:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


def _look_at_zip(file: IO[bytes]) -> tuple[bytes, int]:
    """Return the config of a .keras file, after checking all its sizes, and the bytes of its arrays."""
    num_bytes, config, total = _size_of(file), b"", 0
    with zipfile.ZipFile(file) as archive:
        members = checked_members(archive, num_bytes)
        # A stored member is read in place; a packed one is unpacked into memory.
        check_fits_memory(max((member.file_size for member in members), default=0) if _packs(members) else 0)
        for member in members:
            if member.filename == "model.weights.npz":
                raise ValueError(f"it keeps its weights as {member.filename}; save it with Keras 3, as {_WEIGHTS}")
            content = _content(file, member)
            if member.filename == _CONFIG:
                if member.file_size > _MOST_CONFIG_BYTES:
                    raise ValueError(f"its {_CONFIG} has more than {format_bytes(_MOST_CONFIG_BYTES)}")
                config = content.read()
            elif member.filename.endswith(_WEIGHTS):
                total += _look_at_hdf5(content, num_bytes)[1]
    if not config:
        raise ValueError(f"it holds no {_CONFIG}; give a .keras file, as a run's model.keras")
    return config, total


def _packs(members: list[zipfile.ZipInfo]) -> bool:
    return any(member.compress_type != zipfile.ZIP_STORED for member in members)


def _content(file: IO[bytes], member: zipfile.ZipInfo) -> IO[bytes]:
    """Return a file object for a member: a window of the archive, or its unpacked content with the size checked."""
    if member.compress_type == zipfile.ZIP_STORED:
        window: IO[bytes] = _Window(file, place_of(file, member), member.file_size)  # type: ignore[assignment]
        return window
    unpacked = io.BytesIO()
    for piece in pieces(file, member):
        if member.filename == _CONFIG or member.filename.endswith(_WEIGHTS):
            unpacked.write(piece)
    unpacked.seek(0)
    return unpacked


class _Window(io.RawIOBase):
    """A range of bytes of a file, as a file object."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def readable(self) -> bool:
        """Return True: the range is readable."""
        return True

    def seekable(self) -> bool:
        """Return True: the range is seekable."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, as for any file."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`; return the number of bytes."""
        num_bytes = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._begin + self._at)
        content = self._file.read(num_bytes)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _look_at_hdf5(file: IO[bytes], num_bytes: int) -> tuple[str | bytes | None, int]:
    """Return the config attribute of a .h5 model, and the bytes of its arrays, after checking each array's size."""
    with h5py.File(file, "r") as opened:
        arrays: list[tuple[str, Any]] = []

        def keep(name: str, entry: Any) -> None:
            if isinstance(entry, h5py.Dataset):
                arrays.append((name, entry))
            else:
                _check_links(name, entry)

        # `visititems` passes over external links, which are therefore looked for group by group.
        _check_links("/", opened)
        opened.visititems(keep)
        total = sum(int(array.nbytes) for _, array in arrays)
        check_unpacked(total, num_bytes)
        # Arrays of the optimizer are not read if only the weights are needed.
        check_fits_memory(sum(int(array.nbytes) for name, array in arrays if not name.startswith("optimizer")))
        for name, array in arrays:
            with _named(name):
                _check_array(array, num_bytes)
        config = opened.attrs.get("model_config")
        return (config if isinstance(config, str | bytes) else None), total


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"its array {shown(name)} {error}") from error


def _check_links(name: str, group: Any) -> None:
    for key in group:
        if isinstance(group.get(key, getlink=True), h5py.ExternalLink):
            raise ValueError(f"{shown(f'{name}/{key}')} points into another file")


def _check_array(array: Any, num_bytes: int) -> None:
    """Raise ValueError if the stored data of an array cannot be complete, or exceeds its shape."""
    plan = array.id.get_create_plist()
    if plan.get_external_count() or plan.get_layout() == h5py.h5d.VIRTUAL:
        raise ValueError("is in another file")
    if array.dtype.hasobject:
        raise ValueError("holds something else than numbers")
    # A header can state any size.
    if array.id.get_storage_size() > num_bytes:
        raise ValueError("is said to be larger than the file")
    filters = [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]
    strange = [number for number in filters if number not in _FILTERS]
    # gzip alone may expand a chunk a thousandfold; a second packing filter would multiply that.
    if strange or len(set(filters)) < len(filters) or {_DEFLATE, 32000} <= set(filters):
        raise ValueError(f"is packed by HDF5's filters {filters}; one of gzip and lzf is possible, with shuffle")
    if array.chunks is not None and filters:
        _check_chunks(array, filters)


def _check_chunks(array: Any, filters: list[int]) -> None:
    """Raise ValueError if a chunk holds more than its shape: HDF5 itself unpacks chunks without a limit."""
    size = math.prod(array.chunks) * array.dtype.itemsize
    packs = _DEFLATE in filters
    if packs and any(number != h5py.h5z.FILTER_FLETCHER32 for number in filters[filters.index(_DEFLATE) + 1 :]):
        raise ValueError("is packed by gzip before shuffle; pack it by shuffle before gzip")
    check_unpacked(size, max(FLOOR_BYTES, array.id.get_storage_size()))
    for chunk in _chunks(array):
        if chunk.size > size * _CHUNK_ROOM[0] + _CHUNK_ROOM[1]:
            raise ValueError("has chunks that hold more than their shape")
        if not packs or chunk.filter_mask >> filters.index(_DEFLATE) & 1:  # the bit means: stored without this filter
            continue
        _, packed = array.id.read_direct_chunk(chunk.chunk_offset)
        count = 0
        for piece in bounded(zlib.decompressobj(), packed):
            count += len(piece)
            if count > size + _CHUNK_ROOM[1]:
                raise ValueError("has chunks that unpack to more than their shape")


def _chunks(array: Any) -> list[Any]:
    if not hasattr(array.id, "chunk_iter"):  # an old HDF5, which searches for each chunk
        return [array.id.get_chunk_info(number) for number in range(array.id.get_num_chunks())]
    chunks: list[Any] = []
    array.id.chunk_iter(chunks.append)
    return chunks


def _check_classes(config: Any, known: Mapping[str, Any] | None) -> None:
    """Raise OwnCode if a config names a class or function whose use would run code from the file."""
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        named = [part[key] for key in ("class_name", "registered_name", "spec_name") if isinstance(part.get(key), str)]
        if part.get("class_name") == "function" and isinstance(part.get("config"), str):
            named.append(part["config"])
        for name in named:
            kind = re.split(r"[>.:]", name)[-1]  # `package>Name` as registered, `module.Name` or `module:Name`
            if kind in CODE and name not in (known or ()):
                raise OwnCode(
                    f"it holds {kind}, which is not loaded: {CODE[kind]}; save the model with a class of your own in "
                    "its place"
                )
        module = part.get("module")
        if known is not None and named and isinstance(module, str) and not any(name in known for name in named):
            _check_module(module, named[-1])


def _check_module(module: str, name: str) -> None:
    package = module.partition(".")[0]
    if package not in _TRUSTED or (package == "keras" and not _MODELING.match(module)):
        raise OwnCode(f"it names {shown(f'{module}.{name}')}, which is neither a layer of Keras nor registered here")

"""Documents in files: written whole or not at all (core/storage/disk.py), and read within limits.

A file to read may come from anyone: pipes and devices are refused, and sizes and depths limited, in this one place.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.storage.disk import creating, writing_output

MOST_JSON_BYTES = 32 << 20
"""Limit of a JSON file: `[],[],...` takes 24 times its size in memory."""
MOST_TOML_BYTES = 4 << 20
MOST_DEPTH = 64
_DOTTED_KEY = re.compile(r"""(?<![\w-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){16}""")
"""A key with implausibly many parts; tomllib's time grows with the cube of their number."""
_FINITE = frozenset((str, int, bool, type(None)))
"""Types that cannot be infinite, of most values in thousands of rows."""
_ESCAPED = re.compile(r"[\x7f-\x9f]")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, a file that hpcdl keeps there, atomically and durably."""
    with creating(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically and durably."""
    write_bytes(path, text.encode())


def write_json(path: Path, document: Any) -> None:
    """Write `document` to `path` as indented JSON; NaN and infinity are refused, since JSON lacks them."""
    write_text(path, json_text(document))


def json_text(document: Any) -> str:
    """Return `document` as indented JSON. Raises ValueError for NaN and infinity."""
    import msgspec

    compact = json.dumps(document, allow_nan=False)
    try:
        return msgspec.json.format(compact, indent=1) + "\n"  # json indents in Python: three times as slow
    except msgspec.DecodeError:  # half of a character: part of a name that is not UTF-8
        return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_output(path: Path, content: str | bytes) -> None:
    """Write `content` where the user said. Raises UsageError if a file there is not an unchanged one of hpcdl's."""
    with writing_output(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def without_infinities(document: Any) -> Any:
    """Return `document` with null for each infinite number or NaN, which JSON cannot hold."""
    if isinstance(document, float):
        return document if math.isfinite(document) else None
    if document is None or isinstance(document, str | int):
        return document
    if isinstance(document, dict | Mapping):
        return {key: value if type(value) in _FINITE else without_infinities(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        finite_values = map(without_infinities, document)
        return [*finite_values] if isinstance(document, list) else (*finite_values,)
    return document


def open_regular(path: Path | str) -> BinaryIO:
    """Open `path` for reading. Raises OSError if it is not a plain file: a pipe would block its reader forever."""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path | str) -> int:
    """As `open_regular`, but return a descriptor for reading at offsets; the caller closes it."""
    # O_NONBLOCK: opening a pipe would wait for its writer, before its kind can be checked.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'special')}, not a file", str(path))


def read_bytes(path: Path | str, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Return the content of a plain file of at most `most_bytes`. Raises OSError for anything else."""
    descriptor = open_descriptor(path)  # a file object would double the time, for each of thousands of records
    try:
        size = os.fstat(descriptor).st_size
        content = os.read(descriptor, min(size, most_bytes) + 1)  # the size that is passed is allocated
        while len(content) != size and len(content) <= most_bytes:
            more = os.read(descriptor, most_bytes + 1 - len(content))  # it grows, or came in pieces
            if not more:
                break
            content += more
    finally:
        os.close(descriptor)
    if len(content) > most_bytes:
        raise OSError(errno.EOVERFLOW, f"it is larger than {most_bytes / 2**20:g} MiB", str(path))
    return content


def parse_json(content: bytes | str) -> Any:
    """Return the document in `content`. Raises ValueError if it is not JSON, or nested too deeply."""
    try:
        return shallow(json.loads(content))
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None


def read_json(path: Path | str) -> Any:
    """Return the document in `path`. Raises CorruptError if it is not JSON, FileNotFoundError if there is no file."""
    return in_json(parse_json, read_content(path), path)


def read_content(path: Path | str) -> bytes:
    """Return the content of a plain file. Raises CorruptError if it is unreadable, FileNotFoundError if absent."""
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptError(f"cannot read {path}: {error.strerror}") from error


def in_json(parse: Callable[[bytes], Any], content: bytes, path: Path | str) -> Any:
    """Return the document that `parse` finds in the content of `path`. Raises CorruptError if it is not JSON."""
    try:
        return parse(content)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is not valid JSON ({error})") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables in `text`. Raises ValueError, with line and column, if it is not TOML."""
    if long := _DOTTED_KEY.search(text):
        raise ValueError(f"the key {long[0][:40]!r}... has too many parts")
    try:
        tables: dict[str, Any] = shallow(tomllib.loads(text))
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    return tables


def read_toml(path: Path, wrong: type[HpcdlError] = UsageError, remedy: str = "") -> dict[str, Any]:
    """Return the tables of a TOML file. Raises `wrong` with line and column (CorruptError for files of hpcdl).

    `remedy` ends the error of a file that is not TOML.
    """
    try:
        return parse_toml(read_bytes(path, MOST_TOML_BYTES).decode("utf-8-sig"))  # editors of Windows write a mark
    except FileNotFoundError:
        raise wrong(f"no such config file: {path}; check the path") from None
    except OSError as error:
        raise wrong(f"cannot read config file {path}: {error.strerror}") from None
    except ValueError as error:
        raise wrong(f"{path} is not valid TOML: {error}{remedy}") from None


_CONTAINERS = frozenset((dict, list))
"""The containers that parsers of JSON and TOML nest."""


def shallow(document: Any) -> Any:
    """Return `document` after checking that it is at most MOST_DEPTH deep, so that later code may recurse into it."""
    # A loop: recursion would fail on the depth that it is to find.
    level, depth = [document], 0
    while level:
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        inner: list[Any] = []
        for outer in level:
            values = outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
            if not _CONTAINERS.isdisjoint(map(type, values)):  # most lists hold only numbers
                inner += [child for child in values if type(child) in _CONTAINERS]
        level, depth = inner, depth + 1
    return document


def write_toml(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document` to `path` as TOML, atomically. Raises UsageError, writing nothing, if TOML cannot hold it."""
    write_text(path, toml_text(document))


def toml_text(document: Mapping[str, Any]) -> str:
    """Return `document` as TOML that reads back the same; values that are None are omitted.

    The library lays out the tables. The values are formatted here, because the library loses backslashes and control
    codes. Raises UsageError naming the key of a value that TOML cannot hold: text that is not UTF-8, a number of more
    than 64 bits.
    """
    import toml

    encoder: toml.TomlEncoder[dict[str, Any]] = toml.TomlEncoder()
    encoder.dump_funcs[_Spelt] = lambda value: value.text
    odd = {key: value for key, value in document.items() if value is not None and not _BARE_KEY.fullmatch(key)}
    # They stand before all tables: behind a table's head they would belong to that table.
    lines = [f"{_toml_key(key)} = {_toml_value(value, key)}\n" for key, value in odd.items()]
    plain = {key: value for key, value in document.items() if key not in odd}
    return "".join(lines) + toml.dumps(_spelt(plain, ""), encoder=encoder)


@dataclass(frozen=True)
class _Spelt:
    """A value as its text in TOML."""

    text: str


def _spelt(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return `table` with formatted values; what the library would not lay out as a table goes into one line."""
    spelt: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, Mapping) and _is_plain_table(value):
            spelt[key] = _spelt(value, f"{name}.")
        elif isinstance(value, list | tuple) and value and all(_is_plain_table(part) for part in value):
            spelt[key] = [_spelt(part, f"{name}.") for part in value]
        elif value is not None:
            spelt[key] = _Spelt(_toml_value(value, name))
    return spelt


def _is_plain_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_BARE_KEY.fullmatch(key) for key in value)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key, repr(key))


def _toml_value(value: Any, name: str) -> str:
    if isinstance(value, bool):  # first: bool is a subclass of int
        return str(value).lower()
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name}: {value!r} is not UTF-8 and cannot be kept in a TOML file; rename it") from None
        # JSON leaves DEL as it is, and TOML forbids it; the C1 controls are escaped as well.
        return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(part, name) for part in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(key)} = {_toml_value(part, name)}" for key, part in value.items() if part is not None)
        return f"{{{', '.join(pairs)}}}"
    raise UsageError(f"{name}: {value!r} cannot be kept in a TOML file")

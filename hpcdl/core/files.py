"""Files that are whole or absent: written to a temporary name, fsynced, renamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success it becomes `path`, on failure it is removed.

    The file gets the mode that the umask and a setgid folder imply, because it is made with plain `open`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, atomically and durably."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically and durably."""
    write_bytes(path, text.encode())


def write_json(path: Path, document: Any) -> None:
    """Write `document` to `path` as indented JSON; NaN and infinity are refused, JSON has none."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The document in `path`; CorruptError where it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is not valid JSON ({error})") from error


def sync_file(path: Path) -> None:
    """Force the bytes of `path` to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make a rename in `path` durable; file systems that cannot sync a folder are left alone."""
    with contextlib.suppress(OSError):
        sync_file(path)

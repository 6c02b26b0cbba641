"""Files that unpack: how much they may, told by their directory before anything is read, and held against what comes.

A few MB can stand for GB: zeros pack 1,000 to 1 in a zip, and a header may tell less than is behind it.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import format_bytes

FLOOR_BYTES = 256 << 20
"""What any file may unpack to."""
MOST_RATIO = 100
"""What a larger one may unpack to, by its own size: weights pack to a half, with zeros beside them to a tenth."""
_PIECE_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\3\4"
_ENCRYPTED = 0x1
_NAMES = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
_METHODS = {zipfile.ZIP_STORED: "as it is", zipfile.ZIP_DEFLATED: "by deflate"}


def check_unpacked(unpacked: int, packed: int) -> None:
    """ValueError where `packed` bytes of a file stand for more than they may."""
    most = max(FLOOR_BYTES, MOST_RATIO * packed)
    if unpacked > most:
        raise ValueError(
            f"its {format_bytes(packed)} would unpack to {format_bytes(unpacked)}; at most {format_bytes(most)} are "
            f"taken ({format_bytes(FLOOR_BYTES)}, or {MOST_RATIO} times the file's size)"
        )


def check_fits_memory(needed: int) -> None:
    """ValueError where `needed` bytes are more than this node's memory has left."""
    left = memory_left()
    if left is not None and needed > left:
        raise ValueError(
            f"it holds {format_bytes(needed)} when it is unpacked, and {format_bytes(left)} of memory are free here"
        )


def memory_left() -> int | None:
    """Bytes that processes of this node can still get without swapping; None where the system does not tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def checked_members(archive: zipfile.ZipFile, num_bytes: int) -> list[zipfile.ZipInfo]:
    """The members of an archive of `num_bytes`, by its directory; ValueError where that cannot be true, or is too much.

    Nothing is unpacked: `pieces` finds the members that hold more than the directory tells of.
    """
    members = archive.infolist()
    for member in members:
        if member.compress_type not in _METHODS:
            kind = _NAMES.get(member.compress_type, f"method {member.compress_type}")
            raise ValueError(f"{member.filename} is packed by {kind}; {' or '.join(_METHODS.values())} is possible")
        if member.flag_bits & _ENCRYPTED:
            raise ValueError(f"{member.filename} is encrypted; save it without a password")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(f"{member.filename} is a link; save it as a file")
        if member.compress_type == zipfile.ZIP_STORED and member.file_size != member.compress_size:
            raise ValueError(f"the sizes of {member.filename} in its directory cannot be")
    if sum(member.compress_size for member in members) > num_bytes:
        raise ValueError("its directory tells of more than the file holds")
    check_unpacked(sum(member.file_size for member in members), num_bytes)
    return members


def check_stored(path: Path) -> None:
    """ValueError where anything in a zip archive is packed, or said to be larger than the archive."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        members = checked_members(archive, os.fstat(file.fileno()).st_size)
    packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{packed[0]} is packed")


def place_of(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Where the content of a member begins in its archive; ValueError where none begins."""
    file.seek(max(0, member.header_offset))
    head = file.read(_LOCAL_HEADER.size)
    if len(head) < _LOCAL_HEADER.size or head[:4] != _LOCAL_MAGIC:
        raise ValueError(f"{member.filename} is not where its directory says")
    _, name, extra = _LOCAL_HEADER.unpack(head)
    return int(file.tell() + name + extra)


def pieces(file: IO[bytes], member: zipfile.ZipInfo) -> Iterator[bytes]:
    """The content of a packed member, a MiB at a time; ValueError where it is not as long as the directory says."""
    file.seek(place_of(file, member))
    left, count = member.compress_size, 0
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    while left and not inflate.eof:
        packed = file.read(min(left, _PIECE_BYTES))
        if not packed:
            break
        left -= len(packed)
        for piece in bounded(inflate, packed):
            count += len(piece)
            if count > member.file_size:
                raise ValueError(
                    f"{member.filename} holds more than the {format_bytes(member.file_size)} of its directory"
                )
            yield piece
    if not inflate.eof or count != member.file_size:
        raise ValueError(f"{member.filename} is cut short")


def bounded(inflate: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    """What `packed` gives, a MiB at a time; ValueError where it is damaged."""
    try:
        while True:
            piece = inflate.decompress(packed, _PIECE_BYTES)
            if piece:
                yield piece
            packed = inflate.unconsumed_tail
            # Zlib keeps what it has no room for: without input it can still give a full piece.
            if not packed and len(piece) < _PIECE_BYTES:
                return
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from error

"""Compressed files: limits on their unpacked size, checked in the directory first and then during unpacking.

A few MB can expand to GB: zeros pack 1,000 to 1 in a zip, and a header may state less than the true size.
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
"""Any file may unpack to this size."""
MOST_RATIO = 100
"""Limit for larger files, as a multiple of their size: weights pack to a half, with zeros beside them to a tenth."""
_PIECE_BYTES = 1 << 20
# Of a member's own header (APPNOTE.TXT, 4.3.7): signature, what the directory repeats, lengths of name and extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\3\4"
_ENCRYPTED = 0x1
_NAMES = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
_METHODS = {zipfile.ZIP_STORED: "as it is", zipfile.ZIP_DEFLATED: "by deflate"}


def check_unpacked(unpacked: int, packed: int) -> None:
    """Raise ValueError if `packed` bytes of a file expand to more than is allowed."""
    most = max(FLOOR_BYTES, MOST_RATIO * packed)
    if unpacked > most:
        raise ValueError(
            f"its {format_bytes(packed)} would unpack to {format_bytes(unpacked)}; at most {format_bytes(most)} are "
            f"taken ({format_bytes(FLOOR_BYTES)}, or {MOST_RATIO} times the file's size)"
        )


def check_fits_memory(needed: int) -> None:
    """Raise ValueError if this node has less than `needed` bytes of free memory."""
    left = memory_left()
    if left is not None and needed > left:
        raise ValueError(
            f"it holds {format_bytes(needed)} when it is unpacked, and {format_bytes(left)} of memory are free here"
        )


def memory_left() -> int | None:
    """Return the bytes that processes of this node can still get without swapping; None if the system does not tell."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None


def checked_members(archive: zipfile.ZipFile, num_bytes: int) -> list[zipfile.ZipInfo]:
    """Return the members of an archive of `num_bytes`. Raises ValueError if its directory is false or exceeds limits.

    Nothing is unpacked: `pieces` finds the members that hold more than the directory states.
    """
    members = archive.infolist()
    for member in members:
        if member.compress_type not in _METHODS:
            kind = _NAMES.get(member.compress_type, f"method {member.compress_type}")
            raise ValueError(f"{member.filename} is packed by {kind}; {' or '.join(_METHODS.values())} is possible")
        if member.flag_bits & _ENCRYPTED:
            raise ValueError(f"{member.filename} is encrypted; save it without a password")
        # The upper half holds the mode that Unix gave the file.
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(f"{member.filename} is a link; save it as a file")
        if member.compress_type == zipfile.ZIP_STORED and member.file_size != member.compress_size:
            raise ValueError(f"the sizes of {member.filename} in its directory cannot be")
    if sum(member.compress_size for member in members) > num_bytes:
        raise ValueError("its directory lists more than the file holds")
    check_unpacked(sum(member.file_size for member in members), num_bytes)
    return members


def check_stored(path: Path) -> None:
    """Raise ValueError if any member of a zip archive is compressed, or is listed as larger than the archive."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        members = checked_members(archive, os.fstat(file.fileno()).st_size)
    packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"{packed[0]} is packed")


def place_of(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's content in its archive. Raises ValueError if it has none there."""
    file.seek(max(0, member.header_offset))
    head = file.read(_LOCAL_HEADER.size)
    if len(head) < _LOCAL_HEADER.size or head[:4] != _LOCAL_MAGIC:
        raise ValueError(f"{member.filename} is not where its directory says")
    _, name, extra = _LOCAL_HEADER.unpack(head)
    return int(file.tell() + name + extra)


def pieces(file: IO[bytes], member: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the content of a packed member in pieces of 1 MiB. Raises ValueError if the directory's length is wrong."""
    file.seek(place_of(file, member))
    left, count = member.compress_size, 0
    # Negative: a zip holds raw deflate data without zlib's header.
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
    """Yield what `packed` expands to, in pieces of 1 MiB. Raises ValueError if it is damaged."""
    try:
        while True:
            piece = inflate.decompress(packed, _PIECE_BYTES)
            if piece:
                yield piece
            packed = inflate.unconsumed_tail
            # Zlib buffers output that did not fit: without input it can still give a full piece.
            if not packed and len(piece) < _PIECE_BYTES:
                return
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from error

"""A script's output: ranks print into files of the run directory; the starting process shows them line by line.

The ranks of a node share their files, so the number of files does not grow with the ranks; with --prefix each rank has
its own.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from hpcdl.core.storage.disk import open_to_append, remove_file

STREAMS = ("out", "err")
"""Suffixes of the files for stdout and stderr."""
PREFIXED_VARIABLE = "HPCDL_PREFIX_OUTPUT"
WARNING = "hpcdl: warning: "
"""Begins a rank's line that may be in the record too."""
_RANK, _NODE = "rank-", "node-"
_LONGEST_BYTES = 64 << 10
"""A longer line is passed on before it ends."""


class WholeLines(io.RawIOBase):
    """Passes on complete lines to a file, each in one write, so that lines of two ranks never mix."""

    def __init__(self, descriptor: int) -> None:
        self.name = descriptor
        self._descriptor = descriptor
        self._rest = b""
        self._alone = threading.RLock()

    def fileno(self) -> int:
        """Return the file's descriptor, for writers that bypass this object."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Accept `data`, bytes."""
        with self._alone:
            self._rest += bytes(data)
            end = len(self._rest) if len(self._rest) > _LONGEST_BYTES else self._rest.rfind(b"\n") + 1
            self._hand_on(end)
        return len(data)

    def finish(self) -> None:
        """Write out the rest."""
        with self._alone, contextlib.suppress(OSError):
            self._hand_on(len(self._rest))

    def _hand_on(self, end: int) -> None:
        lines, self._rest = self._rest[:end], self._rest[end:]
        while lines:
            lines = lines[os.write(self._descriptor, lines) :]  # write may take only a part


def print_into(folder: Path, rank: int) -> int:
    """Redirect the output of this process and its children into files in `folder`.

    Returns a descriptor of the former stderr: the launcher's log.
    """
    log = os.dup(2)
    alone = PREFIXED_VARIABLE in os.environ
    name = f"{_RANK}{rank}" if alone else f"{_NODE}{socket.gethostname()}"
    for number, stream_name in enumerate(STREAMS, 1):
        target = open_to_append(folder / f"{name}.{stream_name}")  # appending: all ranks of the node share this file
        os.dup2(target, number)
        os.close(target)
    if not alone:
        sys.stdout, sys.stderr = (_in_whole_lines(number) for number in (1, 2))
    return log


def _in_whole_lines(number: int) -> io.TextIOWrapper:
    lines = WholeLines(number)
    # Also called by `leave` (rank/start.py), which skips the interpreter's own shutdown.
    atexit.register(lines.finish)
    errors = "backslashreplace" if number == 2 else None
    return io.TextIOWrapper(lines, encoding="utf-8", errors=errors, write_through=True)


class Output:
    """Shows what ranks have printed into the files of `folder`, in complete lines."""

    def __init__(self, folder: Path, *, prefixed: bool) -> None:
        self._folder, self._prefixed = folder, prefixed
        self._shown: dict[Path, int] = {}
        self.warnings: set[str] = set()
        """hpcdl's warnings among what has been shown."""
        for path in self._files():
            remove_file(path)  # of an earlier start, and shown then

    def _files(self) -> list[Path]:
        """Return the files by rank or node, stdout before stderr."""
        files = [*self._folder.glob(f"{_RANK}*"), *self._folder.glob(f"{_NODE}*")]
        paths = [path for path in files if path.suffix[1:] in STREAMS]
        return sorted(paths, key=lambda path: (_rank_of(path), path.stem, STREAMS.index(path.suffix[1:])))

    def forward(self, *, rest: bool = False) -> None:
        """Print the output since the last call; an incomplete last line only with `rest`."""
        for path in self._files():
            stream = sys.stdout if path.suffix == f".{STREAMS[0]}" else sys.stderr
            prefix = f"[{_rank_of(path)}] " if self._prefixed else ""
            with contextlib.suppress(OSError), path.open("rb") as file:  # the reader of our output is gone
                file.seek(self._shown.get(path, 0))
                content = file.read()
                content = content if rest else content[: content.rfind(b"\n") + 1]
                self._shown[path] = self._shown.get(path, 0) + len(content)
                for line in content.decode(errors="replace").splitlines(keepends=True):
                    stream.write(prefix + line)
                    if line.startswith(WARNING):
                        self.warnings.add(line.removeprefix(WARNING).rstrip("\n"))
                stream.flush()

    def close(self) -> None:
        """Print the rest."""
        self.forward(rest=True)


def _rank_of(path: Path) -> int:
    number = path.stem.removeprefix(_RANK)
    return int(number) if number.isdigit() else 0

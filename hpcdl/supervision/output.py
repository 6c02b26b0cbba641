"""What a script's ranks print: into files of the run directory, from which the starting process shows it line by line.

The ranks of a node share their files, whose number does not grow with the ranks; with --prefix each has its own.
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

ENDINGS = ("out", "err")
"""Of the files that take what is printed on stdout and stderr."""
PREFIXED_VARIABLE = "HPCDL_PREFIX_OUTPUT"
_RANK, _NODE = "rank-", "node-"
_LONGEST_BYTES = 64 << 10
"""A line that is longer is not kept back until it ends."""


class WholeLines(io.RawIOBase):
    """Hands lines on to a file once they are whole, each in one piece, so that those of two ranks are never mixed."""

    def __init__(self, descriptor: int) -> None:
        self.name = descriptor
        self._descriptor = descriptor
        self._rest = b""
        self._alone = threading.RLock()

    def fileno(self) -> int:
        """Of the file itself, for what goes around this."""
        return self._descriptor

    def writable(self) -> bool:
        """As it says."""
        return True

    def write(self, data: Any, /) -> int:
        """Take `data`, bytes."""
        with self._alone:
            self._rest += bytes(data)
            end = len(self._rest) if len(self._rest) > _LONGEST_BYTES else self._rest.rfind(b"\n") + 1
            self._hand_on(end)
        return len(data)

    def finish(self) -> None:
        """Hand on what is left."""
        with self._alone, contextlib.suppress(OSError):
            self._hand_on(len(self._rest))

    def _hand_on(self, end: int) -> None:
        lines, self._rest = self._rest[:end], self._rest[end:]
        while lines:
            lines = lines[os.write(self._descriptor, lines) :]


def print_into(folder: Path, rank: int) -> int:
    """What this process and its children print goes into files in `folder`.

    Returns where stderr went before: into the launcher's log.
    """
    log = os.dup(2)
    alone = PREFIXED_VARIABLE in os.environ
    name = f"{_RANK}{rank}" if alone else f"{_NODE}{socket.gethostname()}"
    for number, ending in enumerate(ENDINGS, 1):
        target = open_to_append(folder / f"{name}.{ending}")
        os.dup2(target, number)
        os.close(target)
    if not alone:
        sys.stdout, sys.stderr = (_in_whole_lines(number) for number in (1, 2))
    return log


def _in_whole_lines(number: int) -> io.TextIOWrapper:
    lines = WholeLines(number)
    atexit.register(lines.finish)
    errors = "backslashreplace" if number == 2 else None
    return io.TextIOWrapper(lines, encoding="utf-8", errors=errors, write_through=True)


class Output:
    """Shows what ranks have printed into the files of `folder`: whole lines."""

    def __init__(self, folder: Path, *, prefixed: bool) -> None:
        self._folder, self._prefixed = folder, prefixed
        self._shown: dict[Path, int] = {}
        for path in self._files():
            remove_file(path)

    def _files(self) -> list[Path]:
        """By rank or node, stdout before stderr."""
        found = [path for path in self._folder.glob("*-*.*") if path.suffix[1:] in ENDINGS]
        return sorted(found, key=lambda path: (_rank_of(path), path.stem, ENDINGS.index(path.suffix[1:])))

    def forward(self, *, rest: bool = False) -> None:
        """Print what has come since the last call, without the line that is not whole yet unless it is the `rest`."""
        for path in self._files():
            stream = sys.stdout if path.suffix == f".{ENDINGS[0]}" else sys.stderr
            prefix = f"[{_rank_of(path)}] " if self._prefixed else ""
            with contextlib.suppress(OSError), path.open("rb") as file:  # nobody reads any more
                file.seek(self._shown.get(path, 0))
                content = file.read()
                content = content if rest else content[: content.rfind(b"\n") + 1]
                self._shown[path] = self._shown.get(path, 0) + len(content)
                for line in content.decode(errors="replace").splitlines(keepends=True):
                    stream.write(prefix + line)
                stream.flush()

    def close(self) -> None:
        """Print what is left."""
        self.forward(rest=True)


def _rank_of(path: Path) -> int:
    number = path.stem.removeprefix(_RANK)
    return int(number) if number.isdigit() else 0

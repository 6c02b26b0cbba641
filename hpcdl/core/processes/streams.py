"""Standard input, output and errors as they may be found: closed, a pipe whose reader is gone, a disk that is full.

A closed one is opened on /dev/null before anything else is opened, so that no file with data gets its number: what
libraries print on stderr would be written into that. What cannot be printed ends no work: it is remembered, and told
at the end (`Printed.problem`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

UTF8_VARIABLE = "PYTHONUTF8"
"""Python's own: names are UTF-8, whatever the locale says; ranks inherit it."""
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed() -> None:
    """Open what is closed of the three on /dev/null, for this process and for those that it starts."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free is this one: those below it have been seen to.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def use_utf8() -> None:
    """Start this program again where Python takes names for anything but UTF-8, as in an old locale.

    Names in run.toml and in manifests are UTF-8, and ranks on another node may have another locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(UTF8_VARIABLE) != "1":
        os.environ[UTF8_VARIABLE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Printed(io.FileIO):
    """What is printed on an open descriptor; `problem` is why some of it could not be, `unheard`: nobody reads."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` stays open."""
        super().__init__(descriptor, "w", closefd=False)
        self.problem: OSError | None = None
        self.unheard = False

    def write(self, data: Any, /) -> int:
        """Write all of `data`, bytes, or remember why not."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and not self.unheard:
            try:
                written = super().write(view[done:])
            except OSError as error:
                self.unheard = error.errno == errno.EPIPE  # who reads no more has read enough: that is no problem
                self.problem = self.problem if self.unheard else error
                break
            if not written:  # shared with a program that has made it non-blocking
                select.select([], [self], [])
            done += written or 0
        return len(view)


def outlive(name: str) -> Printed:
    """Have `sys.stdout` or `sys.stderr`, by its `name`, raise no error where it cannot be written."""
    before: TextIO = getattr(sys, name)
    with contextlib.suppress(OSError):
        before.flush()
    printed = Printed(before.fileno())
    stream = io.TextIOWrapper(
        io.BufferedWriter(printed),
        encoding=before.encoding,
        errors="backslashreplace",  # a locale that has no letter for a name is no reason to stop either
        line_buffering=name == "stderr" or bool(os.environ.get("PYTHONUNBUFFERED")) or printed.isatty(),
    )
    setattr(sys, name, stream)
    return printed


def unheard() -> bool:
    """Whether nobody reads what this process prints on stdout, or it cannot be written: no use to go on printing."""
    printed = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(printed, Printed) and (printed.unheard or printed.problem is not None)

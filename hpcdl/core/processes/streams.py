"""Signals and the standard streams of a process: caught in one way, written to as they may be found.

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
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to save and leave: schedulers, Ctrl-C, Slurm's warning, a terminal that closes."""
_Handler = Callable[[int, FrameType | None], None]


@contextmanager
def caught(action: Callable[[int], None], numbers: tuple[int, ...] = STOPS, *, yields: bool = False) -> Iterator[None]:
    """While active, each of the signals `numbers` calls `action` with its number; what was before is put back.

    Outside the main thread nothing is caught, as Python wants it; with `yields` nothing that somebody else catches.
    A SIGHUP that is ignored at first (nohup) stays ignored.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        wanted = [number for number in numbers if not yields or signal.getsignal(number) is signal.SIG_DFL]
        before = {number: _catch(number, lambda number, _: action(number)) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_AGAIN_S = 0.05


def keep_interrupts() -> None:
    """Send Ctrl-C again where Python has dropped it: an error inside a callback or a finalizer goes no further.

    Imports have such callbacks, so that a command that has just begun would run to its end.
    """

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(dropped)
            return
        # Not from here: this, too, is inside the callback.
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook


def ignore(*numbers: int) -> None:
    """Let other processes decide what these signals mean for this one."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Remembers the signals of STOPS instead of dying of them."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        """Take over the signals, and what another StopRequest has heard; only the main thread may.

        A rank installs one before anything else, for what comes while it starts up (a blocked signal would not do:
        numerical libraries start threads that do not block it). The run then stops after its first step.
        """
        for number in STOPS:
            before = getattr(_catch(number, self._note), "__self__", None)
            # MPI, its fabric and TensorFlow are not written for system calls that a signal breaks off.
            signal.siginterrupt(number, False)
            self.asked |= isinstance(before, StopRequest) and before.asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def _catch(number: int, handler: _Handler) -> signal._HANDLER:
    """Have `handler` called at this signal; returns the handler before."""
    before = signal.getsignal(number)
    if number != signal.SIGHUP:
        return signal.signal(number, handler)
    if before is signal.SIG_IGN:
        return before

    def hung_up(number: int, frame: FrameType | None) -> None:
        _leave_terminal()
        handler(number, frame)

    signal.signal(number, hung_up)
    return before


def _leave_terminal() -> None:
    """Write to nowhere instead of to a terminal that is gone: each word would be an error in the middle of a save."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)


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

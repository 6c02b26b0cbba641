"""Signals and standard streams of a process: one way to catch signals, and safe writing to any stream.

A closed stream is opened on /dev/null before any other file, so that no data file gets its number. Otherwise libraries
that print on stderr would write into that file. Output that cannot be printed stops no work: the problem is stored, and
reported at the end (`Printed.problem`).
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
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to save and leave: from schedulers, Ctrl-C, Slurm's warning, a closing terminal."""
_Handler = Callable[[int, FrameType | None], None]


@contextmanager
def caught(action: Callable[[int], None], numbers: tuple[int, ...] = STOPS, *, yields: bool = False) -> Iterator[None]:
    """While active, call `action` with the number of each signal in `numbers`; then restore the earlier handlers.

    Outside the main thread nothing is caught, because Python forbids it; with `yields`, no signal that already has a
    handler. A SIGHUP that is ignored at first (nohup) stays ignored.
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


def suspended_alone(what: str) -> AbstractContextManager[None]:
    """While active, Ctrl-Z says that `what` continue, and suspends this process: the only one that it reaches."""
    text = f"hpcdl: suspended, but the {what} continue: `fg` shows them again, and Ctrl-C then ends them\n"

    def suspend(number: int) -> None:
        bar_over = "\n\x1b[?25h" if os.isatty(2) else ""  # a bar has hidden the cursor, which the shell needs
        with contextlib.suppress(OSError):
            os.write(2, f"{bar_over}{text}".encode())  # sys.stderr may be in the middle of a write
        handler = signal.signal(number, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), number)  # returns when this process continues
        signal.signal(number, handler)

    return caught(suspend, (signal.SIGTSTP,), yields=True)


_AGAIN_S = 0.05


def keep_interrupts() -> None:
    """Send Ctrl-C again if Python dropped it: an error inside a callback or a finalizer is not propagated.

    Imports have such callbacks, so that a command that has just begun would run to its end.
    """

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(dropped)
            return
        # Raising here would not help: this hook also runs inside the callback.
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook


def ignore(*numbers: int) -> None:
    """Ignore these signals, because other processes decide what they mean for this one."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Stores the signals of STOPS in `asked` instead of ending the process."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        """Install the handlers, and take over what another StopRequest received. Main thread only.

        A rank installs one first of all, for signals during its start. Blocking signals would not do, because numerical
        libraries start threads that do not block them. The run then stops after its first step.
        """
        for number in STOPS:
            before = getattr(_catch(number, self._note), "__self__", None)
            # MPI, its fabric and TensorFlow do not handle system calls that a signal interrupts.
            signal.siginterrupt(number, False)
            self.asked |= isinstance(before, StopRequest) and before.asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def _catch(number: int, handler: _Handler) -> signal._HANDLER:
    """Install `handler` for this signal, and return the handler before."""
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
    """Redirect output from a closed terminal to /dev/null: each write would be an error in the middle of a save."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)


UTF8_VARIABLE = "PYTHONUTF8"
"""Python's own variable: names are UTF-8, whatever the locale; ranks inherit it."""
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed() -> None:
    """Open the closed ones of the three streams on /dev/null, for this process and its children."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one, since those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def use_utf8() -> None:
    """Restart this program if Python's encoding for file names is not UTF-8, as in an old locale.

    Names in run.toml and in manifests are UTF-8, and ranks on another node may have another locale.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(UTF8_VARIABLE) != "1":
        os.environ[UTF8_VARIABLE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Printed(io.FileIO):
    """Output to an open descriptor. `problem` is the error that stopped it; `unheard`: its reader is gone."""

    def __init__(self, descriptor: int) -> None:
        """Write to `descriptor`, which stays open."""
        super().__init__(descriptor, "w", closefd=False)
        self.problem: OSError | None = None
        self.unheard = False

    def write(self, data: Any, /) -> int:
        """Write all bytes of `data`, or store the reason why not."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and not self.unheard:
            try:
                written = super().write(view[done:])
            except OSError as error:
                self.unheard = error.errno == errno.EPIPE  # the reader has read enough: that is no problem
                self.problem = self.problem if self.unheard else error
                break
            if not written:  # another program that shares the descriptor made it non-blocking
                select.select([], [self], [])
            done += written or 0
        return len(view)


def outlive(name: str) -> Printed:
    """Replace `sys.stdout` or `sys.stderr`, by `name`, with a stream that raises no error if writing fails."""
    before: TextIO = getattr(sys, name)
    with contextlib.suppress(OSError):
        before.flush()
    printed = Printed(before.fileno())
    stream = io.TextIOWrapper(
        io.BufferedWriter(printed),
        encoding=before.encoding,
        errors="backslashreplace",  # a name that the locale cannot encode is no reason to stop either
        line_buffering=name == "stderr" or bool(os.environ.get("PYTHONUNBUFFERED")) or printed.isatty(),
    )
    setattr(sys, name, stream)
    return printed


def unheard() -> bool:
    """Return whether further output to stdout is pointless: its reader is gone, or writing failed."""
    printed = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(printed, Printed) and (printed.unheard or printed.problem is not None)

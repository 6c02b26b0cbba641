"""The one way to catch signals: for a while, by `caught`, or for the rest of a rank's life, by StopRequest."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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

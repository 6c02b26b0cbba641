"""Processes that run from a tree on this machine, as far as /proc shows them to this user."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_GONE_S = 10.0
"""Time that a killed process may take to end: until its current system call returns."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a person or a scheduler stops a command."""


class Stopped(BaseException):
    """One of STOPS arrived. Steps that may fail without ending the install do not catch this."""


def ignore_stops() -> None:
    """Ignore further signals: the remaining clean-up takes seconds, and must not stop halfway."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def running_from(tree: Path) -> list[int]:
    """Return the processes, except this one, whose command line, program or mapped files are in `tree`."""
    inside = f"{tree}/"
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(number for number in numbers if number != os.getpid() and _uses(Path(f"/proc/{number}"), inside))


def end_programs_of(tree: Path) -> None:
    """Kill processes that run programs of `tree`, an unfinished one: steps that outlived their install."""
    inside = f"{tree}/".encode()
    left = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _runs(entry, inside)]
    for number in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    end = time.monotonic() + _GONE_S
    while any(_runs(Path(f"/proc/{number}"), inside) for number in left) and time.monotonic() < end:
        time.sleep(0.01)


def _runs(process: Path, inside: bytes) -> bool:
    """Return whether a process runs a program in `inside`; an ended process has no command line, even as a zombie."""
    try:
        return (process / "cmdline").read_bytes().startswith(inside)
    except OSError:
        return False


def _uses(process: Path, inside: str) -> bool:
    """Return whether a process uses `inside`; all users see its command line, but only its user and root the rest."""
    needle = inside.encode()
    try:
        if any(word.startswith(needle) for word in (process / "cmdline").read_bytes().split(b"\0")[:2]):
            return True
        if str((process / "exe").readlink()).startswith(inside):
            return True
        return b" " + needle in (process / "maps").read_bytes()
    except OSError:
        return False

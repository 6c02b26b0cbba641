"""Who is running from a tree on this machine, as far as /proc tells this user."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_GONE_S = 10.0
"""How long a process that was killed may take to end: until the system call that it is in returns."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a person or a scheduler stops a command."""


class Stopped(BaseException):
    """One of STOPS came. No step that may fail while the others go on takes it for its own failure."""


def ignore_stops() -> None:
    """From here to the end no signal interrupts: what is left to do takes seconds, and half of it would be a mess."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def running_from(tree: Path) -> list[int]:
    """The processes, this one apart, whose command line, program or mapped files lie in `tree`."""
    inside = f"{tree}/"
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(number for number in numbers if number != os.getpid() and _uses(Path(f"/proc/{number}"), inside))


def end_programs_of(tree: Path) -> None:
    """Kill what runs by programs of `tree`, an unfinished one: steps that outlived the install that started them."""
    inside = f"{tree}/".encode()
    left = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _runs(entry, inside)]
    for number in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    end = time.monotonic() + _GONE_S
    while any(_runs(Path(f"/proc/{number}"), inside) for number in left) and time.monotonic() < end:
        time.sleep(0.01)


def _runs(process: Path, inside: bytes) -> bool:
    """A process that has ended has no command line, whether somebody has asked for its exit code or not."""
    try:
        return (process / "cmdline").read_bytes().startswith(inside)
    except OSError:
        return False


def _uses(process: Path, inside: str) -> bool:
    """The command line is open to everybody; the program and the maps only to its user and to root."""
    needle = inside.encode()
    try:
        if any(word.startswith(needle) for word in (process / "cmdline").read_bytes().split(b"\0")[:2]):
            return True
        if str((process / "exe").readlink()).startswith(inside):
            return True
        return b" " + needle in (process / "maps").read_bytes()
    except OSError:
        return False

"""Who is running from a tree on this machine, as far as /proc tells this user."""

from __future__ import annotations

import os
from pathlib import Path


def running_from(tree: Path) -> list[int]:
    """The processes, this one apart, whose command line, program or mapped files lie in `tree`."""
    inside = f"{tree}/"
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(number for number in numbers if number != os.getpid() and _uses(Path(f"/proc/{number}"), inside))


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

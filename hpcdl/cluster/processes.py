"""Commands that must end by themselves in a given time, and what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdl.core.errors import HpcdlError

OWN_WORD = "hpcdl: "
"""What a line on stderr begins with that says more than the launcher's own chatter around it."""


def run(line: Sequence[str], environment: Mapping[str, str], *, timeout_s: float, what: str) -> str:
    """What `line` prints on stdout; HpcdlError, beginning with `what`, where it fails or takes too long."""
    try:
        done = subprocess.run(
            line,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HpcdlError(f"{what}: `{line[0]}` did not end in {timeout_s:g} s") from None
    except OSError as error:
        raise HpcdlError(f"{what}: `{line[0]}` cannot be started: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        own = [text.removeprefix(OWN_WORD) for text in lines if text.startswith(OWN_WORD)]
        raise HpcdlError(f"{what}: {own[0]}" if own else f"{what}: `{line[0]}` failed: {lines[-1]}")
    return done.stdout


def end_marked(variable: str, value: str) -> None:
    """Kill this user's processes on this node in whose environment `variable` is `value`, this one apart."""
    mark = f"{variable}={value}".encode()
    for number in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        with contextlib.suppress(OSError):
            if number != os.getpid() and mark in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                os.kill(number, signal.SIGKILL)

"""Commands that must end by themselves in a given time."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from hpcdl.core.errors import HpcdlError


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
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise HpcdlError(f"{what}: `{line[0]}` failed: {last}")
    return done.stdout

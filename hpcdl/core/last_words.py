"""What a rank says before it ends the job."""

from __future__ import annotations

import sys
import time

FORWARDED_S = 0.3
"""Launchers forward what a rank has said; of one that aborts at once they may drop it."""


def say_last(text: str) -> None:
    """Write `text` to stderr in one piece, and wait until a launcher has forwarded it."""
    sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
    sys.stderr.flush()
    time.sleep(FORWARDED_S)

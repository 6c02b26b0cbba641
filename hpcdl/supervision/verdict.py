"""How a rank ended: its state and exit code, and the line that says most of an error."""

from __future__ import annotations

import re

from hpcdl.comm.agree import SilentExit
from hpcdl.core.errors import ConfigError, HpcdlError, Interrupted, RankError, StoppedEarly, original, printable

_LOST_PEER = ("UnavailableError", "AbortedError", "CancelledError")
"""What TensorFlow's own engines raise when another rank is gone, by name: servers run without TensorFlow."""
_RAISED = re.compile(r"\w*(Error|Exception): ")
"""How Python names an error in a traceback."""


def verdict(error: BaseException) -> tuple[str, int]:
    """A rank's state and exit code after `error`."""
    error = original(error)
    if isinstance(error, StoppedEarly):
        return "stopped", error.exit_code
    if isinstance(error, (RankError, SilentExit)):
        return "bereaved", error.exit_code
    # TensorFlow makes an error of its own of a lost peer that the exchange has met: it keeps the class in its text.
    if type(error).__name__ in _LOST_PEER or f"{RankError.__name__}: " in str(error):
        return "bereaved", 1
    interrupted = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
    return "failed", error.exit_code if isinstance(error, HpcdlError) else interrupted


def one_line(error: BaseException) -> str:
    """The line of an error that says most: the first, of TensorFlow's graphs what went wrong inside; with its class.

    Of several refusals at once all, behind each other.
    """
    error = original(error)
    if isinstance(error, ConfigError):
        return printable("; also: ".join(error.problems))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0]
    if text.startswith("Graph execution error"):
        before_node = [line for line in lines if "{{node" not in line]
        text = next((line for line in lines if _RAISED.match(line)), before_node[-1])
    return printable(text if isinstance(error, HpcdlError) else f"{type(error).__name__}: {text}".rstrip(": "))

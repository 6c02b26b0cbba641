"""What goes wrong in a user's own code, as one line that says where."""

from __future__ import annotations

import traceback


def failure(error: BaseException, file: str = "") -> str:
    """`failed at FILE:LINE: TYPE: TEXT`; the line is the innermost one in `file`, or else the innermost of all."""
    if isinstance(error, SyntaxError):
        where: str | None = f"{error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == file] or frames[-1:]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else None
    detail = next(iter(str(error).strip().splitlines()), "no details")
    remedy = "; install it, or add its folder to PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
    return f"failed at {where}: {type(error).__name__}: {detail}{remedy}"

"""`scripts/installer COMMAND AT SIGNAL`: run the installer without pip, and send SIGNAL after its AT-th change."""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

number, at = signal.Signals(int(sys.argv.pop())), int(sys.argv.pop())
changes = itertools.count(1)


def makes(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return `change`, counted only if it creates a file."""
    telling = told(change)
    return lambda path, flags, *arguments, **named: (telling if flags & os.O_CREAT else change)(
        path, flags, *arguments, **named
    )


def told(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return `change`, followed by the signal if it is the requested one."""

    def changed(*arguments: Any, **named: Any) -> Any:
        result = change(*arguments, **named)
        if next(changes) == at:
            os.kill(os.getpid(), number)
        return result

    return changed


sys.path[:0] = ["scripts/installer", str(Path.cwd())]
build = __import__("build")
build.fill = lambda plan: (plan.tree / "install.json").write_text("{}")
for name in ("mkdir", "chmod", "rename", "replace", "unlink", "rmdir"):
    setattr(os, name, told(getattr(os, name)))
os.open = makes(os.open)
try:
    runpy.run_path("scripts/installer", run_name="__main__")
finally:
    if next(changes) <= at:
        print("no such change")

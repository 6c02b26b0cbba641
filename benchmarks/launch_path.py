"""How much of hpcdl's code `hpcdl train` passes through before it starts its ranks: files, functions, calls, jumps.

    python benchmarks/launch_path.py [--files]

Counted by Python's profiler in this process, up to the line that would start the launcher (mpiexec).
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import hpcdl

PACKAGE = str(Path(hpcdl.__file__).parent)
TRAIN = "train --model lenet --data synthetic:mnist@400 --strategy ring --ranks 2 --steps 4 --profile none"


class Reached(BaseException):
    """The launcher would start at this point; no code of hpcdl catches this."""


class Walk:
    """Counts of entered code by file and function; `jumps` are calls from one file to another."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.functions: Counter[tuple[str, str]] = Counter()
        self.jumps = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Profiler hook: count a call into hpcdl, except bodies of modules and classes, and comprehensions."""
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # not a class body
        if event != "call" or not is_function or not code.co_filename.startswith(PACKAGE):
            return
        name = str(Path(code.co_filename).relative_to(PACKAGE))
        self.files[name] += 1
        self.functions[name, code.co_qualname] += 1
        caller = frame.f_back
        self.jumps += caller is None or caller.f_code.co_filename != code.co_filename


def walked(arguments: list[str]) -> Walk:
    """Follow `hpcdl ARGUMENTS` up to its launcher."""
    from hpcdl.cli.main import main

    walk, begin = Walk(), subprocess.Popen.__init__

    def started(self: Any, command: Any, *others: Any, **settings: Any) -> None:
        if "hpcdl.rank.main" in list(map(str, command)):
            sys.setprofile(None)
            raise Reached
        begin(self, command, *others, **settings)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
    sys.argv = ["hpcdl", *arguments]
    try:
        sys.setprofile(walk)
        main()
    except Reached:
        return walk
    finally:
        sys.setprofile(None)
        subprocess.Popen.__init__ = begin  # type: ignore[method-assign]
    raise SystemExit("hpcdl train ended before it started its ranks")


def main() -> None:
    """Print the counts, and the files with --files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="each file with its calls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        walk = walked([*TRAIN.split(), "--run-dir", f"{folder}/run"])
    if options.files:
        for name, calls in sorted(walk.files.items()):
            print(f"{calls:6d}  {name}")
    calls = sum(walk.files.values())
    print(f"files {len(walk.files)}, functions {len(walk.functions)}, calls {calls}, jumps {walk.jumps}")


if __name__ == "__main__":
    main()

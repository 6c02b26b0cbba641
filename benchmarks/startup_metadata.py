"""File-system requests of a rank while it starts, from a shared environment and from the node's own copy.

    python benchmarks/startup_metadata.py [--folder DIR] [--imports MODULE,MODULE]

Packs and unpacks this Python's virtual environment as `--stage-env` does (twice its size in DIR), then lets one rank
import what a training imports, under `strace -f`, from each. Calls that name a file are counted by the folder that
contains it. An earlier import, which does not count, compiles what was not compiled yet.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hpcdl.cluster.own_env import UNPACK, pack

IMPORTS = "mpi4py.MPI,h5py,tensorflow,keras,hpcdl.rank.main"
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((?:AT_FDCWD, )?\"([^\"]*)\"")


def calls(python: Path, imports: Sequence[str], folder: Path) -> list[tuple[str, str]]:
    """Return name and path of every system call that names a file while `python` imports `imports`."""
    line = [str(python), "-c", f"import {', '.join(imports)}"]
    subprocess.run(line, check=True, capture_output=True)
    trace = folder / "trace"
    tracer = ["strace", "-f", "-qq", "-e", "trace=%file", "-e", "signal=none", "-s", "4096", "-o", str(trace)]
    subprocess.run([*tracer, *line], check=True, capture_output=True)
    found = [_CALL.match(text) for text in trace.read_text(errors="replace").splitlines()]
    return [(match[1], match[2]) for match in found if match]


def counted(python: Path, imports: Sequence[str], folder: Path, positions: dict[str, Path]) -> dict[str, object]:
    """Return the numbers of calls, by folder and by name."""
    made = calls(python, imports, folder)
    below = {what: sum(path.startswith(f"{place}/") for _, path in made) for what, place in positions.items()}
    names = collections.Counter(name for name, _ in made).most_common(5)
    return {"all": len(made), **below, "most": dict(names)}


def main() -> None:
    """Measure both and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--imports", default=IMPORTS)
    chosen = parser.parse_args()
    imports = chosen.imports.split(",")
    positions = {"shared environment": Path(sys.prefix), "base Python": Path(sys.base_prefix)}
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="hpcdl-startup-") as scratch:
        folder = Path(scratch)
        began = time.monotonic()
        archive = pack(Path(sys.prefix), folder / "packed")
        packed = time.monotonic()
        node = folder / "node"
        subprocess.run(["bash", "-c", UNPACK, "unpack", str(node), str(archive)], check=True)
        unpacked = time.monotonic()
        python = node / "bin" / Path(sys.executable).name
        result = {
            "archive_bytes": archive.stat().st_size,
            "pack_seconds": packed - began,
            "unpack_seconds": unpacked - packed,
            "as_installed": counted(Path(sys.executable), imports, folder, positions),
            "staged": counted(python, imports, folder, {**positions, "node's own copy": node}),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Write the card of docs/reference/certify.md: `hpcdl certify` over four nodes of the lab's Slurm cluster.

    python -m tests.lab.certify --out FOLDER [--mpi LIBRARY] [--ssh] -- WORDS OF CERTIFY

`--mpi`: the file of an MPI library; without it mpi4py chooses. srun starts the ranks, with `--ssh` MPI's own mpiexec.
FOLDER gets the card and its runs; if it has a card already, the work is resumed. An allocation lasts at most an hour.
"""

from __future__ import annotations

import argparse
import signal
import sys
import types
from pathlib import Path

from tests.lab.nodes import on_nodes

NODES = 4


def main() -> int:
    """Return the exit code of `hpcdl certify`, after printing its output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mpi", type=Path)
    parser.add_argument("--ssh", action="store_true")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    out = asked.out.resolve()
    environment = {"MPI4PY_LIBMPI": str(asked.mpi)} if asked.mpi else {}
    with on_nodes(NODES, by_ssh=asked.ssh) as nodes:
        words = ["certify", "--nodes", str(NODES), "--ranks", str(NODES), "--out", out, "--resume", *asked.words]
        process = nodes.start(words, cwd=out.parent, env=environment)
        reported, complained = process.communicate()
        print(reported, complained, sep="\n")
        return process.returncode


def _leave(number: int, frame: types.FrameType | None) -> None:
    """Exit, so that the lab is stopped."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

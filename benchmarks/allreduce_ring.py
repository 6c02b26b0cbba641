"""hpcdl's all-reduces against one in-place MPI_Allreduce of the whole buffer: ranks of one core each, all in one run.

    python benchmarks/allreduce_ring.py [--ranks 2] [--megabytes 25,244] [--repeats 15]

The algorithms take turns, so that other work on the machine affects all of them; medians of the slowest rank's time.
MPI4PY_LIBMPI chooses another MPI than the one that mpi4py finds by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy
from numpy.typing import NDArray

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from hpcdl.collectives import auto, halving_doubling, hierarchical, ring
from hpcdl.collectives.slices import Workspace
from hpcdl.comm.mpi.communicator import world

Array = NDArray[numpy.float32]
RAW = "one MPI_Allreduce"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", default="25,244")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure([round(float(part) * 1e6) for part in options.megabytes.split(",")], options.repeats)
        return
    mpiexec = find_mpiexec()
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", str(options.ranks), sys.executable]
    line += [__file__, *sys.argv[1:], "--rank"]
    sys.exit(subprocess.run(line, env=os.environ | dict(environment_for(mpiexec.flavour)), check=False).returncode)


def measure(sizes: list[int], repeats: int) -> None:
    """Measure on one rank; rank 0 prints a line of JSON for each size."""
    communicator = world()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[communicator.rank % len(cores)]})
    workspace = Workspace()
    contenders: dict[str, Callable[[Array], None]] = {
        RAW: communicator.allreduce,
        "ring": lambda buffer: ring.allreduce(communicator, buffer, workspace),
        "halving-doubling": lambda buffer: halving_doubling.allreduce(communicator, buffer, workspace),
        "hierarchical": lambda buffer: hierarchical.allreduce(communicator, buffer, workspace),
        "auto": lambda buffer: auto.allreduce(communicator, buffer, workspace),
    }
    for num_bytes in sizes:
        buffer = numpy.empty(num_bytes // 4, numpy.float32)
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(repeats + 2):
            for name, call in contenders.items():
                buffer.fill(1)
                communicator.barrier()
                start_s = time.perf_counter()
                call(buffer)
                seconds = max(communicator.allgather_json(time.perf_counter() - start_s))
                if buffer[0] != communicator.size or buffer[-1] != communicator.size:
                    raise SystemExit(f"{name} is wrong")
                if repeat > 1:
                    samples[name].append(seconds)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        if communicator.rank == 0:
            rows = {
                name: {
                    "ms": round(seconds * 1e3, 2),
                    "best_ms": round(min(samples[name]) * 1e3, 2),
                    "bandwidth_over_mpi": round(medians[RAW] / seconds, 2),
                }
                for name, seconds in medians.items()
            }
            print(json.dumps({"library": communicator.library, "ranks": communicator.size, "bytes": num_bytes, **rows}))


if __name__ == "__main__":
    main()

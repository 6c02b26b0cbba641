"""What the exchange costs a training step: two ranks of one core each, steps with and without it in turn.

    python benchmarks/step_efficiency.py [--quick] [--models resnet50,hepcnn,alexnet]

Prints, for ResNet-50 and HEP-CNN (batch 8) and AlexNet (batch 16) with `ring` and `auto`: medians of the step with and
without exchange, the efficiency, and for AlexNet the exposed exchange over one raw in-place MPI_Allreduce of the same
bytes, measured just before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec

CASES = {"resnet50": (8, 12), "hepcnn": (8, 15), "alexnet": (16, 15), "lenet": (16, 15)}
"""Batch and steps; LeNet is there to try this out."""
RAW = """
import sys, time, numpy
from mpi4py import MPI
buffer = numpy.ones(int(sys.argv[1]) // 4, numpy.float32)
times = []
for _ in range(12):
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
    times.append(time.perf_counter() - began)
    buffer[:] = 1
if MPI.COMM_WORLD.rank == 0:
    print(sorted(times[2:])[5])
"""


def bench(model: str, batch: int, steps: int, strategy: str) -> dict[str, float]:
    command = [
        sys.executable, "-m", "hpcdl", "bench", "step", "--model", model, "--batch-size", str(batch),
        "--ranks", "2", "--strategy", strategy, "--steps", str(steps), "--json",
    ]  # fmt: skip
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def raw_allreduce_s(num_bytes: int) -> float:
    mpiexec = find_mpiexec()
    answer = subprocess.run(
        [str(mpiexec.path), "-n", "2", sys.executable, "-c", RAW, str(num_bytes)],
        check=True, capture_output=True, text=True, env={**os.environ, **environment_for(mpiexec.flavour)},
    )  # fmt: skip
    return float(answer.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the steps, ring alone")
    parser.add_argument("--models", default="resnet50,hepcnn,alexnet")
    chosen = parser.parse_args()
    quick = chosen.quick
    print("model     strategy  without s   with s  efficiency  exposed s  exposed/raw")
    for model in chosen.models.split(","):
        batch, steps = CASES[model]
        for strategy in ("ring",) if quick else ("ring", "auto"):
            raw = []
            num_bytes = 249_513_376 if model == "alexnet" else 0
            if num_bytes:
                raw.append(raw_allreduce_s(num_bytes))
            found = bench(model, batch, max(3, steps // 3) if quick else steps, strategy)
            if num_bytes:
                raw.append(raw_allreduce_s(num_bytes))
            exposed = found["exposed_communication_seconds"]
            ratio = f"{exposed / statistics.fmean(raw):.2f}" if raw else ""
            print(
                f"{model:<10}{strategy:<10}{found['compute_seconds']:9.3f}{found['step_seconds']:9.3f}"
                f"{found['efficiency']:12.3f}{exposed:11.3f}  {ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()

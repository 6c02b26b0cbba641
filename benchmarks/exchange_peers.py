"""AlexNet's exposed exchange with hpcdl's `ring` and `auto`, TensorFlow's gRPC ring, and Horovod where it is built.

    python benchmarks/exchange_peers.py [--steps 10] [--model alexnet] [--horovod PYTHON --mpiexec MPIEXEC]

Two ranks of one core each, batch 16, everything in one run, medians. Exposed is the step with exchange minus the step
without, which takes turns with it in the same processes. Horovod 0.28.1 brings a step without of its own, on TensorFlow
2.12: PYTHON is that of an environment with both, MPIEXEC the one of the MPI that it was built with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

BATCH = 16
MODELS = ("alexnet", "lenet")
"""LeNet is there to try this out."""


def hpcdl(*arguments: str) -> str:
    command = [sys.executable, "-m", "hpcdl", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def own(model: str, strategy: str, steps: int) -> tuple[float, float]:
    """Seconds of a step with and without exchange."""
    found = json.loads(hpcdl(
        "bench", "step", "--model", model, "--batch-size", str(BATCH), "--ranks", "2", "--strategy", strategy,
        "--steps", str(steps), "--allow-grpc", "--json",
    ))  # fmt: skip
    return found["step_seconds"], found["compute_seconds"]


def horovod(python: str, mpiexec: str, steps: int) -> tuple[float, float]:
    """Seconds of a step with and without exchange."""
    script = Path(__file__).with_name("horovod_alexnet.py")
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    command = [mpiexec, *root, "--bind-to", "none", "-n", "2", python, str(script), str(BATCH), str(steps)]
    environment = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"}
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    found = json.loads(next(line for line in answer.splitlines() if line.startswith("{")))
    return found["step_seconds"], found["compute_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", choices=MODELS, default="alexnet")
    parser.add_argument("--horovod", help="Python of an environment with Horovod")
    parser.add_argument("--mpiexec", default="mpiexec.openmpi")
    given = parser.parse_args()
    rows = {strategy: own(given.model, strategy, given.steps) for strategy in ("ring", "auto", "grpc-ring")}
    if given.horovod:
        rows["horovod"] = horovod(given.horovod, given.mpiexec, given.steps)
    print("engine      with s  without s  exposed s  of grpc-ring's")
    slow = rows["grpc-ring"][0] - rows["grpc-ring"][1]
    for name, (step_s, compute_s) in rows.items():
        exposed_s = step_s - compute_s
        print(f"{name:<10}{step_s:8.3f}{compute_s:11.3f}{exposed_s:11.3f}{exposed_s / slow:12.3f}")


if __name__ == "__main__":
    main()

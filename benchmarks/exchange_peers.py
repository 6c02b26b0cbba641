"""AlexNet's exposed exchange with hpcdl's `ring` and `auto`, TensorFlow's gRPC ring, and Horovod where it is built.

    python benchmarks/exchange_peers.py [--steps 10] [--model alexnet] [--horovod PYTHON --mpiexec MPIEXEC]

Two ranks of one core each, batch 16, everything in one run, medians. Exposed is the step with exchange minus the step
without. The gRPC ring has no step without exchange; hpcdl's is taken, the same network on the same TensorFlow. Horovod
0.28.1 brings its own, on TensorFlow 2.12: PYTHON is that of an environment with both, MPIEXEC the one of the MPI that
it was built with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BATCH = 16
DATA = {"alexnet": "synthetic:227x227x3:1000", "lenet": "synthetic:28x28x1:10"}
"""By model; LeNet is there to try this out."""


def hpcdl(*arguments: str) -> str:
    command = [sys.executable, "-m", "hpcdl", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def own(model: str, strategy: str, steps: int) -> tuple[float, float]:
    """Seconds of a step with and without exchange."""
    found = json.loads(hpcdl(
        "bench", "step", "--model", model, "--batch-size", str(BATCH), "--ranks", "2", "--strategy", strategy,
        "--steps", str(steps), "--json",
    ))  # fmt: skip
    return found["step_seconds"], found["compute_seconds"]


def grpc_ring(model: str, steps: int) -> float:
    """Seconds of a step with TensorFlow's gRPC ring, the slowest rank's."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        hpcdl(
            "train", "--strategy", "grpc-ring", "--allow-grpc", "--ranks", "2", "--model", model, "--data",
            DATA[model], "--batch-size", str(BATCH), "--steps", str(steps + 3), "--run-dir", str(run),
        )  # fmt: skip
        record = json.loads((run / "record.json").read_text())
    return statistics.median(record["step_seconds"])


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
    parser.add_argument("--model", choices=DATA, default="alexnet")
    parser.add_argument("--horovod", help="Python of an environment with Horovod")
    parser.add_argument("--mpiexec", default="mpiexec.openmpi")
    given = parser.parse_args()
    rows = {strategy: own(given.model, strategy, given.steps) for strategy in ("ring", "auto")}
    rows["grpc-ring"] = grpc_ring(given.model, given.steps), rows["ring"][1]
    if given.horovod:
        rows["horovod"] = horovod(given.horovod, given.mpiexec, given.steps)
    print("engine      with s  without s  exposed s  of grpc-ring's")
    slow = rows["grpc-ring"][0] - rows["grpc-ring"][1]
    for name, (step_s, compute_s) in rows.items():
        exposed_s = step_s - compute_s
        print(f"{name:<10}{step_s:8.3f}{compute_s:11.3f}{exposed_s:11.3f}{exposed_s / slow:12.3f}")


if __name__ == "__main__":
    main()

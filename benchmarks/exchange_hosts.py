"""Exposed time of a step's exchange between hosts, beside a raw MPI_Allreduce of its bytes.

    python -m benchmarks.exchange_hosts [--hosts 2] [--rates 1gbit,10gbit,] [--strategies ring,auto]
                                        [--compress none,fp16,bf16] [--model alexnet] [--batch-size 16]
                                        [--steps 6] [--tries 3]

A rank on each of tests/lab's hosts, which share the processors of this machine; an empty rate leaves the links as fast
as the kernel makes them. `hpcdl bench step` (steps with and without exchange in turn) for each strategy and way of
compressing, and `hpcdl bench allreduce` of the gradient's bytes, take turns. A try is a median of its steps; printed
are medians, minima and maxima of the tries. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.shaped_hosts import run_on
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.models.table import model_info
from tests.lab.hosts import Lab, lab_folder

PATIENCE_S = 580.0


def main() -> None:
    """Print the results of each link after its tries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", default="1gbit,10gbit,")
    parser.add_argument("--strategies", default="ring,auto")
    parser.add_argument("--compress", default="none")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tries", type=int, default=3)
    given = parser.parse_args()
    for rate in given.rates.split(","):
        with lab_folder() as folder:
            lab = Lab(folder, num_nodes=given.hosts, rate=rate)
            try:
                lab.start()
                tell(rate or "unshaped", measure(lab, given))
            finally:
                lab.stop()


def measure(lab: Lab, given: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the results of `hpcdl bench` for each way and for the raw all-reduce, try by try."""
    network = given.model.split(":")[1] if given.model.startswith("emulated:") else given.model
    size = ["--sizes", str(model_info(network).gradient_bytes), "--repeats", "3"]
    ways = [*itertools.product(given.strategies.split(","), given.compress.split(","))]
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.tries):
        rows = on_hosts(lab, ["bench", "allreduce", *size])["rows"]
        found.setdefault("raw", []).append(
            {"exposed": next(row["seconds"] for row in rows if row["algorithm"] == "mpi")}
        )
        for strategy, wire in ways:
            step = [
                "bench",
                "step",
                "--model",
                given.model,
                "--batch-size",
                str(given.batch_size),
                "--warmup-steps",
                "2",
            ]
            told = on_hosts(
                lab, [*step, "--steps", str(given.steps), "--strategy", strategy, "--compress", wire]
            )  # fmt: skip
            found.setdefault(f"{strategy}, {wire}", []).append(
                {"step": told["step_seconds"], "exposed": told["exposed_communication_seconds"]}
            )
    return found


def on_hosts(lab: Lab, arguments: list[str]) -> dict[str, Any]:
    """Return the JSON document of one command with a rank on each host."""
    mpiexec = find_mpiexec()
    command = [str(Path(sys.executable).parent / "hpcdl"), *arguments, "--json"]
    text = run_on(lab, mpiexec.path, command, PATIENCE_S, environment_for(mpiexec.flavour))
    document: dict[str, Any] = json.loads(text[text.index("{") :])
    return document


def tell(link: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Print each way's medians and range, and its exposed exchange relative to the raw all-reduce of the same try."""
    for way, tries in found.items():
        parts = [f"{name} {spread([one[name] for one in tries])}" for name in tries[0]]
        ratios = [one["exposed"] / raw["exposed"] for one, raw in zip(tries, found["raw"], strict=True)]
        print(f"{link}: {way:12} {', '.join(parts)} s; of raw {spread(ratios)}", flush=True)


def spread(values: list[float]) -> str:
    """Median (minimum to maximum)."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()

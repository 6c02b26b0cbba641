"""The paper's pairs with one slow rank: time to an accuracy on the digits, the best learning rate of one grid for each.

    python -m benchmarks.easgd_pairs --data digits-shards --out result.json

Three workers (and a server where the method has one) on this node; worker 1 sleeps twice as long as each of its steps
takes, so it is three times slower. Every method tries the grid of learning rates with the first seed; the best of them,
by time to the target, runs with all seeds. Prints the median and a 95 % Student-t interval of the logarithm for each
method, in seconds and in updates of the center.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAIRS = (("async-easgd", "async-sgd"), ("async-measgd", "async-msgd"), ("hogwild-easgd", "hogwild-sgd"))
GRID = (0.1, 0.05, 0.02, 0.01, 0.005)
WORKERS, SLOW_RANK, SLOW_FACTOR = 3, 1, 3
TARGET = 0.97


def case(method: str, rate: float, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The settings of one run."""
    servers = 1 if method.startswith("async") else 0
    return {
        "model": "lenet", "data": str(options.data), "strategy": method, "ranks": WORKERS + servers, "batch-size": 16,
        "learning-rate": rate, "seed": seed, "epochs": options.epochs, "target-accuracy": TARGET,
        "run-dir": str(folder / f"{method}-{rate:g}-{seed}"),
    }  # fmt: skip


def run(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run the cases in one mpiexec; what each took."""
    from hpcdl.cluster.mpiexec import environment_for, find_mpiexec

    mpiexec = find_mpiexec()
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    ranks = max(found["ranks"] for found in cases)
    command = [
        str(mpiexec.path),
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "benchmarks.easgd_pairs",
        "--cases",
        str(file),
    ]
    subprocess.run(command, check=True, env={**os.environ, **environment_for(mpiexec.flavour)})
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


def slow_down(rank: int) -> None:
    """Make the steps of one rank three times as long."""
    from hpcdl.strategies.flat import FlatWorker

    if rank != SLOW_RANK:
        return
    plain = FlatWorker.after_step

    def after_step(self: FlatWorker, step: int) -> None:
        plain(self, step)
        now = time.perf_counter()
        began = getattr(self, "began", now)
        time.sleep((SLOW_FACTOR - 1) * min(now - began, 1.0))
        self.began = time.perf_counter()  # type: ignore[attr-defined]

    FlatWorker.after_step = after_step  # type: ignore[method-assign]


def run_on_ranks(file: Path) -> None:
    """One rank of `run`. A diverged run is a result too: it never reached the target."""
    from hpcdl.training import runtime

    runtime.silence()
    from hpcdl.comm.mpi import world
    from hpcdl.config.load import Layer, load
    from hpcdl.config.schema import TrainConfig
    from hpcdl.core.errors import HpcdlError
    from hpcdl.core.records import read_record
    from hpcdl.training import rundir
    from hpcdl.training.job import run_rank
    from hpcdl.training.prepare import prepare

    everybody = world()
    slow_down(everybody.rank)
    results = []
    for settings in json.loads(file.read_text()):
        effective = load(TrainConfig, [Layer(origin="flag", values=settings)])
        run_dir = Path(settings["run-dir"])
        takes_part = everybody.rank < settings["ranks"]
        group = everybody.split(0 if takes_part else 1)
        if takes_part:
            if group.rank == 0:
                rundir.create(run_dir, effective, {})
            group.barrier()
            try:
                run_rank(prepare(effective), group, run_dir)
            except HpcdlError:  # raised by all workers alike, when every one of them has left
                if everybody.rank == 0:
                    everybody.abort(1)
        everybody.barrier()
        if everybody.rank == 0:
            record = read_record(run_dir)
            reached = next((p.step for p in record.history if (p.val_accuracy or 0) >= TARGET), None)
            results.append({"seconds": record.seconds_to_target, "steps": reached, "staleness": record.staleness_mean})
            print(settings["strategy"], settings["learning-rate"], settings["seed"], results[-1], flush=True)
            (file.parent / "results.json").write_text(json.dumps(results))


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the 95 % Student-t interval of the mean logarithm, as factors back in the values' unit."""
    from scipy import stats

    logs = [math.log(value) for value in values]
    if len(logs) < 2:
        return values[0], math.nan, math.nan
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return statistics.median(values), math.exp(middle - half), math.exp(middle + half)


def main() -> None:
    """Grid, then seeds, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--rates", type=float, nargs="+", default=GRID)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases:
        run_on_ranks(options.cases)
        return
    found = compare(options)
    print(table(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


def attempt(method: str, rate: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run in an mpiexec of its own: one that diverges never reaches the target, and must not end the others."""
    with tempfile.TemporaryDirectory(prefix="hpcdl-pairs-") as name:
        try:
            (result,) = run([case(method, rate, seed, options, Path(name))], Path(name))
        except subprocess.CalledProcessError:
            return {"seconds": None, "steps": None, "staleness": None}
    return result


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """The best learning rate of each method, and its runs with every seed."""
    found: dict[str, Any] = {}
    for method in (name for pair in PAIRS for name in pair):
        tried = {rate: attempt(method, rate, 0, options) for rate in options.rates}
        reached = {rate: one["seconds"] for rate, one in tried.items() if one["seconds"] is not None}
        best = min(reached, key=lambda rate: reached[rate]) if reached else None
        seeds = range(1, options.seeds + 1) if best is not None else ()
        found[method] = {"grid": tried, "rate": best, "runs": [attempt(method, best, seed, options) for seed in seeds]}
        if options.out:  # what there is so far: the whole takes a while
            options.out.write_text(json.dumps(found, indent=1))
    return found


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = []
    for method, one in found.items():
        for unit in ("seconds", "steps"):
            values = [float(run[unit]) for run in one["runs"] if run[unit] is not None]
            if values:
                middle, low, high = interval(values)
                missed = len(one["runs"]) - len(values)
                note = f", {missed} never" if missed else ""
                lines.append(
                    f"{method:14s} rate {one['rate']:g}: {middle:.3g} {unit} "
                    f"[{low:.3g}, {high:.3g}], n {len(values)}{note}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

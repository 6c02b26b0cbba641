"""The paper's pairs with one slow rank: time to an accuracy on the digits, each at its best learning rate of one grid.

    python -m benchmarks.easgd_pairs --data digits-shards --out pairs.json [--minutes 6]

Three workers (and a server if the method needs one) on this node; worker 1 takes three times as long as the others:
it sleeps twice as long as each of its gradients took. Both methods of a pair run with the same learning rates and the
same five seeds. A method's best rate has the lowest median time to the target; a run that never reaches it counts as
infinite. A rate with three such runs is dropped. Finished runs are kept in --out: with --minutes the script stops in
time, and the next call continues.

Prints, for each method at its best rate, the median and a 95 % Student-t interval of the mean logarithm, in seconds
after the first step (which compiles) and in updates per worker; and the interval of each pair's ratio, seed by seed.
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

PLAIN = (0.2, 0.1, 0.05, 0.02)
WITH_MOMENTUM = (0.05, 0.02, 0.01, 0.005, 0.002)
PAIRS = (
    ("async-easgd", "async-sgd", PLAIN),
    ("async-measgd", "async-msgd", WITH_MOMENTUM),
    ("hogwild-easgd", "hogwild-sgd", PLAIN),
    ("sync-easgd", "easgd", PLAIN),
)
SEEDS = (0, 1, 2, 3, 4)
HOPELESS = 3
WORKERS, TARGET = 3, 0.97
Run = dict[str, Any]


def todo(done: list[Run]) -> list[Run]:
    """Return the runs still to do: every rate with every seed, except rates that failed too often to be the best."""
    known = {(one["method"], one["rate"], one["seed"]): one["seconds"] for one in done}
    wanted = []
    for first, second, rates in PAIRS:
        for method in (first, second):
            for rate in rates:
                seconds = [known.get((method, rate, seed), 0.0) for seed in SEEDS]
                if seconds.count(None) < HOPELESS:
                    wanted += [{"method": method, "rate": rate, "seed": seed} for seed in SEEDS]
    return [one for one in wanted if (one["method"], one["rate"], one["seed"]) not in known]


def at_best_rate(method: str, done: list[Run]) -> dict[int, Run]:
    """Return a method's runs by seed, at the learning rate with the lowest median time; empty if there is none."""
    by_rate: dict[float, dict[int, Run]] = {}
    for one in done:
        if one["method"] == method and one["seed"] in SEEDS:
            by_rate.setdefault(one["rate"], {})[one["seed"]] = one
    return min(by_rate.values(), key=_median_seconds, default={})


def _median_seconds(by_seed: dict[int, Run]) -> float:
    seconds = [by_seed.get(seed, {}).get("seconds") for seed in SEEDS]
    return statistics.median(math.inf if one is None else one for one in seconds)


def settings(one: Run, data: Path, epochs: int, folder: Path) -> dict[str, Any]:
    """Return the settings of one run."""
    servers = 0 if one["method"].startswith(("hogwild", "sync")) else 1
    return {
        "model": "lenet", "data": str(data), "strategy": one["method"], "ranks": WORKERS + servers, "batch-size": 16,
        "learning-rate": one["rate"], "seed": one["seed"], "epochs": epochs, "target-accuracy": TARGET,
        "run-dir": str(folder / f"{one['method']}-{one['rate']:g}-{one['seed']}"),
    }  # fmt: skip


def run(wanted: list[Run], options: argparse.Namespace, deadline: float) -> list[Run]:
    """Run in sequence on the same processes; a run that diverges ends them, and never reached the target."""
    from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec

    mpiexec = find_mpiexec()
    with tempfile.TemporaryDirectory(prefix="hpcdl-pairs-") as name:
        folder = Path(name)
        cases, results = folder / "cases.json", folder / "results.json"
        cases.write_text(json.dumps([settings(one, options.data, options.epochs, folder) for one in wanted]))
        results.write_text("[]")
        command = [str(mpiexec.path), "-n", str(WORKERS + 1), sys.executable, "-m", "benchmarks.easgd_pairs_ranks",
                   str(cases), str(results), str(deadline)]  # fmt: skip
        environment = {**os.environ, **environment_for(mpiexec.flavour)}
        failed = subprocess.run(command, check=False, env=environment, stdin=subprocess.DEVNULL).returncode != 0
        found = [one | result for one, result in zip(wanted, json.loads(results.read_text()), strict=False)]
        diverged = results.with_suffix(".diverged").exists()
    if failed and not diverged:
        raise SystemExit(f"the ranks failed after {len(found)} runs, and not because weights had diverged")
    if diverged:
        found.append(wanted[len(found)] | {"seconds": None, "steps": None, "staleness": None})
    return found


def interval(logs: list[float]) -> str:
    """Return the mean of logarithms as a factor, with its 95 % Student-t interval."""
    from scipy import stats

    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return f"{math.exp(middle):.3g} [one value]"
    half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(middle):.3g} [{math.exp(middle - half):.3g}, {math.exp(middle + half):.3g}]"


def table(done: list[Run]) -> str:
    """Return medians, intervals and ratios, as Markdown."""
    lines = ["| method | rate | seconds, median | mean [95 %] | updates per worker, median | mean [95 %] | staleness |"]
    lines.append("|---|---|---|---|---|---|---|")
    ratios = []
    for first, second, _ in PAIRS:
        pair = {method: at_best_rate(method, done) for method in (first, second)}
        lines += [_row(method, by_seed) for method, by_seed in pair.items() if by_seed]
        both = [seed for seed in SEEDS if all(pair[m].get(seed, {}).get("seconds") for m in (first, second))]
        for unit in ("seconds", "steps") if both else ():
            logs = [math.log(pair[first][seed][unit] / pair[second][seed][unit]) for seed in both]
            ratios.append(f"{first} / {second}: {interval(logs)} in {unit}, {len(both)} seeds")
    return "\n".join([*lines, "", *ratios])


def _row(method: str, by_seed: dict[int, Run]) -> str:
    reached = [one for one in by_seed.values() if one["seconds"] is not None]
    cells = [method, f"{next(iter(by_seed.values()))['rate']:g}"]
    for unit in ("seconds", "steps"):
        values = [one[unit] for one in reached]
        middle = f"{statistics.median(values):.3g}" if values else "never"
        cells += [middle, interval([math.log(value) for value in values]) if values else ""]
    if len(reached) < len(by_seed):
        cells[2] += f" ({len(by_seed) - len(reached)} of {len(by_seed)} never)"
    stale = [one["staleness"] for one in reached if one["staleness"] is not None]
    return f"| {' | '.join([*cells, f'{statistics.fmean(stale):.2f}' if stale else ''])} |"


def main() -> None:
    """Run what is missing, within the time, and print all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    done: list[Run] = json.loads(options.out.read_text()) if options.out.exists() else []
    while (wanted := todo(done)) and time.monotonic() < deadline:
        done += run(wanted, options, deadline)
        options.out.write_text(json.dumps(done, indent=1))
    print(table(done))
    print("done" if not wanted else f"{len(wanted)} runs or more are left; call again")


if __name__ == "__main__":
    main()

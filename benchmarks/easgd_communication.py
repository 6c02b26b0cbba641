"""Communication share of `easgd` (round robin) and sync-easgd 1, 2, 3 on shaped hosts, with emulated compute.

    python -m benchmarks.easgd_communication --hosts 9 --rate 200mbit --mib 8 --out result.json

As root, in the lab's namespaces (tests/lab): one rank per host, of which the last is the server. No TensorFlow: the
strategies' own replicas exchange weights of the given size; computing a gradient is a wait that uses no core. First the
round robin's exchange is measured without compute. A worker's compute is hidden by the turns of the others, so a round
does not become longer if each worker computes for 13 % of it. The wait has that length, and round robin communicates
for 87 % of a round, as in SC17 (the real share is measured and printed). Then every method runs with that wait. Prints
medians over the rounds of one run, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.comm.mpi.communicator import world
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import find_strategy, load_strategy

SHARE = 0.87
METHODS = (("easgd", "3"), ("sync-easgd", "1"), ("sync-easgd", "2"), ("sync-easgd", "3"))


def rounds(
    everybody: Communicator, name: str, variant: str, num_elements: int, compute_s: float, num_rounds: int
) -> list[float]:
    """Return the seconds of each round on the slowest worker; the same on every rank."""
    info = find_strategy(name)
    workers = everybody.size - 1
    serves = info.features.servers
    takes_part = serves or everybody.rank < workers
    group = everybody.split(0 if takes_part else 1)
    own: list[float] = []
    if takes_part:
        context = Context(
            info=info,
            communicator=group,
            num_workers=workers,
            num_servers=1 if serves else 0,
            exchange=ExchangeConfig(),
            optimizer=OptimizerConfig(),
            elastic=ElasticConfig(variant=variant),
        )
        strategy: Any = load_strategy(info)
        if context.is_worker:
            own = _work(strategy.replica(context), num_elements, compute_s, num_rounds)
        else:
            strategy.server(context).serve()
    everybody.barrier()
    gathered = [times for times in everybody.allgather_json(own) if times]
    return [max(column) for column in zip(*gathered, strict=True)]


def _work(replica: Any, num_elements: int, compute_s: float, num_rounds: int) -> list[float]:
    gradient = np.zeros(num_elements, np.float32)
    replica.start(np.ones(num_elements, np.float32), [num_elements])
    replica.group.barrier()
    own = []
    for step in range(num_rounds + 1):
        began = time.perf_counter()
        replica.before_step(step)
        time.sleep(compute_s)
        replica.step(gradient)
        own.append(time.perf_counter() - began)
    replica.finish()
    return own[1:]  # the first round uses new memory


def measure(everybody: Communicator, num_elements: int, num_rounds: int) -> dict[str, Any]:
    """Measure everything in one run."""
    bare = statistics.median(rounds(everybody, "easgd", "3", num_elements, 0.0, num_rounds))
    compute_s = bare * (1 - SHARE)
    found: dict[str, Any] = {"weights_bytes": 4 * num_elements, "workers": everybody.size - 1, "compute_s": compute_s}
    for name, variant in METHODS:
        times = rounds(everybody, name, variant, num_elements, compute_s, num_rounds)
        median = statistics.median(times)
        label = name if name == "easgd" else f"{name} {variant}"
        found[label] = {"round_s": median, "communication_share": max(median - compute_s, 0.0) / median, "all_s": times}
    return found


def report(found: dict[str, Any]) -> str:
    """Return the table that docs/performance.md quotes."""
    first = found["easgd"]["round_s"]
    lines = [
        f"{found['workers']} workers, {found['weights_bytes'] / 2**20:.2f} MiB of weights, "
        f"compute {1e3 * found['compute_s']:.0f} ms (emulated)"
    ]
    for label, row in found.items():
        if isinstance(row, dict):
            lines.append(
                f"{label:14s} {1e3 * row['round_s']:8.1f} ms a round  communication {row['communication_share']:5.1%}"
                f"  {first / row['round_s']:5.2f}x"
            )
    exposed = [found[f"sync-easgd {variant}"]["round_s"] - found["compute_s"] for variant in "23"]
    lines.append(f"variant 3 hides {1 - max(exposed[1], 0) / exposed[0]:.0%} of what variant 2 exposes")
    return "\n".join(lines)


def main() -> None:
    """With --ranks, run as one rank; otherwise start the hosts and the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=9)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--mib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        everybody = world()
        found = measure(everybody, int(options.mib * 2**18), options.rounds)
        if everybody.rank == 0:
            print(json.dumps(found))
        return
    found = on_hosts(options)
    print(report(found))
    if options.out:
        options.out.write_text(json.dumps({"rate": options.rate, **found}, indent=1))


def on_hosts(options: argparse.Namespace) -> dict[str, Any]:
    """Start the lab's hosts and run one rank on each, by mpich's mpiexec over the shaped network."""
    from benchmarks.shaped_hosts import run_ranks
    from hpcdl.cluster.launchers.mpiexec import find_mpiexec

    command = [sys.executable, "-m", "benchmarks.easgd_communication", "--rank", "--mib", str(options.mib),
               "--rounds", str(options.rounds)]  # fmt: skip
    return json.loads(run_ranks(options.hosts, options.rate, find_mpiexec().path, command).splitlines()[-1])


if __name__ == "__main__":
    main()

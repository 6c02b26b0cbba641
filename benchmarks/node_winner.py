"""Is the winner of tune-threads as good as exhaustive search, and as TensorFlow's defaults and Intel's advice?

For each network: exhaustive search over a sub-space of at most 16 candidates of this node, three rounds in turn, each
sample a fresh process; then `tune-threads`' own search over the same sub-space, measuring anew, with at most half as
many samples; at last the rivals (the exhaustive best, the search's winner, TensorFlow's defaults, Intel's guide) in
turn for several rounds in one run. Ratios are of medians within that last run.

    python benchmarks/node_winner.py --models hepcnn,lenet,resnet50 --rounds 3 --out FILE.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from hpcdl.node.engine import Engine, find_engine
from hpcdl.node.search import Search
from hpcdl.node.settings import Settings, chosen, describe
from hpcdl.node.space import Candidate, build_space, intel_guide, tensorflow_defaults
from hpcdl.node.topology import Topology, read_topology
from hpcdl.study.trials import Measurer, Workload

BATCHES = {"hepcnn": 8, "lenet": 64, "resnet50": 8}
STEPS = {"hepcnn": 5, "lenet": 60, "resnet50": 3}
TIMEOUT_S = 400.0
MAX_CANDIDATES = 16


def sub_space(topology: Topology, engine: Engine) -> list[Candidate]:
    """One rank or one per core, filling the node; one or two operations at a time; bound or not; two allocators: 16."""
    num_cores = len(topology.usable_cores)
    allocators = [name for name in ("default", "glibc-huge") if name in engine.allocators]
    narrowing: dict[str, list[Any]] = {
        "only": [True],
        "ranks_per_node": sorted({1, num_cores}),
        "intra_op_threads": sorted({1, num_cores}),
        "inter_op_threads": [1, 2],
        "binding": ["balanced", "none"],
        "allocator": allocators,
    }
    candidates = [
        candidate
        for candidate in build_space(topology, engine, narrowing=narrowing).candidates
        if (candidate.settings.ranks_per_node or 1) * (candidate.settings.intra_op_threads or 1) == num_cores
    ]
    return candidates[:MAX_CANDIDATES]


def as_candidate(topology: Topology, engine: Engine, settings: Settings) -> Candidate:
    values = {name: [value] for name, value in dataclasses.asdict(settings).items()}
    return build_space(topology, engine, narrowing={"only": [True], **values}).candidates[0]


def study(model: str, rounds: int, topology: Topology, engine: Engine) -> dict[str, Any]:
    measurer = Measurer(
        workload=Workload(model=model, batch_size=BATCHES[model], steps=STEPS[model]), topology=topology
    )
    candidates = sub_space(topology, engine)

    def sample(candidate: Candidate) -> float | None:
        outcome = measurer.measure(candidate, TIMEOUT_S)
        if outcome.images_per_second is None:
            print(f"  {outcome.status}: {outcome.message}", file=sys.stderr)
        return outcome.images_per_second

    print(f"{model}: {len(candidates)} candidates", file=sys.stderr)
    table: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds):
        for index, candidate in enumerate(candidates):
            value = sample(candidate)
            if value is not None:
                table[index].append(value)
    means = [statistics.fmean(values) if values else 0.0 for values in table]
    exhaustive = candidates[means.index(max(means))]
    search = Search(
        [dataclasses.asdict(item.settings) for item in candidates], max_samples=rounds * len(candidates) // 2
    )
    while asked := search.ask():
        search.tell(asked[0], sample(candidates[asked[0]]))
    choice = search.best()
    if choice is None:
        raise SystemExit(f"{model}: every trial failed")
    rivals = {
        "search": candidates[choice.index],
        "exhaustive": exhaustive,
        "tensorflow defaults": as_candidate(topology, engine, tensorflow_defaults(topology)),
        "intel guide": as_candidate(topology, engine, intel_guide(topology)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, candidate in rivals.items():
            value = sample(candidate)
            if value is not None:
                speeds[name].append(value)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "model": model,
        "batch_size": BATCHES[model],
        "exhaustive_table": [
            {"settings": chosen(item.settings), "images_per_second": values}
            for item, values in zip(candidates, table, strict=True)
        ],
        "search_samples": search.num_samples,
        "exhaustive_samples": rounds * len(candidates),
        "regret_in_exhaustive_table": 1 - means[choice.index] / max(means),
        "settings": {name: describe(item.settings) for name, item in rivals.items()},
        "images_per_second": speeds,
        "median_images_per_second": medians,
        "search_over": {name: medians["search"] / median for name, median in medians.items() if name != "search"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="lenet,hepcnn,resnet50")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    topology, engine = read_topology(), find_engine()
    results = []
    for model in arguments.models.split(","):
        results.append(study(model, arguments.rounds, topology, engine))
        text = json.dumps({"node": topology.summary, "engine": engine.summary, "results": results}, indent=1)
        if arguments.out:
            arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

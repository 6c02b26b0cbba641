"""Compare the winner of tune-threads with exhaustive search, TensorFlow's defaults and Intel's advice.

For each network: exhaustive search over a stated sub-space of at most 16 candidates of this node, in three rounds,
each sample in a new process. Then `tune-threads`' own search over the same sub-space, measured again, with at most half
as many samples. Finally the rivals (the exhaustive best, the search's winner, TensorFlow's defaults, Intel's guide) in
turn for several rounds. Ratios are of medians within those last rounds.

    python benchmarks/node_winner.py --journal FILE.jsonl --minutes 6

Every sample is written to the journal. With `--minutes` the script stops in time with exit code 75; the same command
continues where the journal ends, so a machine that is quiet for only minutes at a time is enough.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.node.engine import Engine, find_engine
from hpcdl.node.machines import read_topology
from hpcdl.node.profile import Settings, chosen, describe
from hpcdl.node.topology import Topology
from hpcdl.tuning.search import Search
from hpcdl.tuning.space import Candidate, build_space, intel_guide, tensorflow_defaults
from hpcdl.tuning.trials import Measurer, Workload

TIMEOUT_S = 400.0
STOPPED_EARLY = 75
ALLOCATORS = ("default", "glibc-huge")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A network, its trial, and the compared points of ranks x inter-op threads x allocator."""

    batch_size: int
    steps: int
    sub_space: str
    keep: Callable[[Settings], bool]


JOBS: dict[str, Job] = {
    "lenet": Job(
        batch_size=64, steps=200,
        sub_space="1 rank of all cores or a rank per core; 1 or 2 operations at a time; 2 allocators: 8 candidates",
        keep=lambda settings: True,
    ),
    "hepcnn": Job(
        batch_size=8, steps=4,
        sub_space="1 rank of all cores with 1 or 2 operations at a time, or a rank per core with 1; 2 allocators: 6",
        keep=lambda settings: settings.ranks_per_node == 1 or settings.inter_op_threads == 1,
    ),
    "resnet50": Job(
        batch_size=8, steps=3,
        sub_space="1 rank of all cores or a rank per core; 1 operation at a time; 2 allocators: 4 candidates",
        keep=lambda settings: settings.inter_op_threads == 1,
    ),
}  # fmt: skip


class OutOfTime(Exception):
    """The next sample might not end within `--minutes`."""


@dataclass(kw_only=True)
class Journal:
    """Samples in the order of requests: those in the file are repeated from it, the others measured."""

    path: Path
    deadline: float
    known: list[dict[str, Any]] = field(default_factory=list)
    place: int = 0
    longest_s: float = 20.0

    def sample(self, key: Mapping[str, Any], measure: Callable[[], float | None]) -> float | None:
        if self.place < len(self.known):
            entry = self.known[self.place]
            if entry["key"] != key:
                raise SystemExit(f"{self.path} line {self.place + 1} is of another run: {entry['key']}, not {key}")
            self.place += 1
            value: float | None = entry["images_per_second"]
            return value
        if time.monotonic() + self.longest_s > self.deadline:
            raise OutOfTime
        began = time.monotonic()
        value = measure()
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "images_per_second": value, "at": time.time()}) + "\n")
        return value


def sub_space(job: Job, topology: Topology, engine: Engine) -> list[Candidate]:
    """Return candidates whose threads fill the cores, with the same total for any number of ranks."""
    num_cores = len(topology.usable_cores)
    narrowing: dict[str, list[Any]] = {
        "only": [True],
        "ranks_per_node": sorted({1, num_cores}),
        "intra_op_threads": sorted({1, num_cores}),
        "inter_op_threads": [1, 2],
        "binding": ["balanced"],
        "allocator": [name for name in ALLOCATORS if name in engine.allocators],
    }
    return [
        candidate
        for candidate in build_space(topology, engine, narrowing=narrowing).candidates
        if (candidate.settings.ranks_per_node or 1) * (candidate.settings.intra_op_threads or 1) == num_cores
        and job.keep(candidate.settings)
    ]


def as_candidate(topology: Topology, engine: Engine, settings: Settings) -> Candidate:
    values = {name: [value] for name, value in dataclasses.asdict(settings).items()}
    return build_space(topology, engine, narrowing={"only": [True], **values}).candidates[0]


def study(model: str, rounds: int, topology: Topology, engine: Engine, journal: Journal) -> dict[str, Any]:
    job = JOBS[model]
    measurer = Measurer(workload=Workload(model=model, batch_size=job.batch_size, steps=job.steps), topology=topology)
    candidates = sub_space(job, topology, engine)

    def sample(phase: str, candidate: Candidate) -> float | None:
        def measure() -> float | None:
            outcome = measurer.measure(candidate, TIMEOUT_S)
            if outcome.images_per_second is None:
                print(f"  {outcome.status}: {outcome.message}", file=sys.stderr)
            return outcome.images_per_second

        return journal.sample({"model": model, "phase": phase, "settings": describe(candidate.settings)}, measure)

    table: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds):
        for index, candidate in enumerate(candidates):
            value = sample("exhaustive", candidate)
            if value is not None:
                table[index].append(value)
    means = [statistics.fmean(values) if values else 0.0 for values in table]
    exhaustive = candidates[means.index(max(means))]
    search = Search(
        [dataclasses.asdict(item.settings) for item in candidates], max_samples=rounds * len(candidates) // 2
    )
    while asked := search.ask():
        search.tell(asked[0], sample("search", candidates[asked[0]]))
    choice = search.best()
    if choice is None:
        raise SystemExit(f"{model}: every trial failed")
    rivals = {
        "search": candidates[choice.index],
        "exhaustive": exhaustive,
        "tensorflow defaults": as_candidate(topology, engine, tensorflow_defaults(topology)),
        "intel guide": as_candidate(topology, engine, intel_guide(topology)),
    }
    different = {describe(candidate.settings): candidate for candidate in rivals.values()}
    speeds: dict[str, list[float]] = {name: [] for name in different}
    for _ in range(rounds):
        for name, candidate in different.items():
            value = sample("rivals", candidate)
            if value is not None:
                speeds[name].append(value)
    medians = {name: statistics.median(speeds[describe(item.settings)]) for name, item in rivals.items()}
    return {
        "model": model,
        "batch_size": job.batch_size,
        "sub_space": job.sub_space,
        "exhaustive_table": [
            {"settings": chosen(item.settings), "images_per_second": values}
            for item, values in zip(candidates, table, strict=True)
        ],
        "search_samples": search.num_samples,
        "exhaustive_samples": rounds * len(candidates),
        "regret_in_exhaustive_table": 1 - means[choice.index] / max(means),
        "settings": {name: describe(item.settings) for name, item in rivals.items()},
        "rivals_images_per_second": speeds,
        "median_images_per_second": medians,
        "search_over": {name: medians["search"] / median for name, median in medians.items() if name != "search"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="lenet,hepcnn,resnet50")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--journal", type=Path, default=Path("node_winner.jsonl"))
    parser.add_argument("--minutes", type=float, default=24 * 60.0)
    arguments = parser.parse_args()
    known = [json.loads(line) for line in arguments.journal.open()] if arguments.journal.exists() else []
    journal = Journal(path=arguments.journal, deadline=time.monotonic() + 60 * arguments.minutes, known=known)
    topology, engine = read_topology(), find_engine()
    results: list[dict[str, Any]] = []
    try:
        for model in arguments.models.split(","):
            results.append(study(model, arguments.rounds, topology, engine, journal))
    except OutOfTime:
        print(f"out of time in {model}; the same command continues", file=sys.stderr)
    print(json.dumps({"node": topology.summary, "engine": engine.summary, "results": results}, indent=1))
    if len(results) < len(arguments.models.split(",")):
        sys.exit(STOPPED_EARLY)


if __name__ == "__main__":
    main()

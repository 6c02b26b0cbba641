"""How long a run that loses ranks needs to recover in place, by parts: two kills per run, at random steps and ranks.

    MPI4PY_MPIABI=openmpi python benchmarks/recovery_in_place.py --data SHARDS [--runs 6] [--model lenet] [--seed 0]
        [--strategy ring] [--servers 0]

Needs Open MPI 5. Three workers, of which one remains at the end, or with servers (two or more) two workers and fewer
servers; a rank plants its own SIGKILL (`--inject`) and logs it right before. A recovery lasts from that line of the
journal to the end of the first step without the rank; the journal gives its parts. A run that does not end with exit
code 0 counts as lost, and a run that starts new ranks as not in place.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hpcdl.strategies.table import find_strategy

WORKERS, STEPS = 3, 240


def run_once(line: list[str], folder: Path, drawn: random.Random, servers: int) -> tuple[list[dict[str, float]], str]:
    """Return the seconds of each recovery, with its parts; and the outcome of the run in one word."""
    first, second = drawn.sample(range(WORKERS), 2)
    if servers:  # a worker and a server, in either order
        first, second = drawn.sample([first, drawn.randrange(WORKERS, WORKERS + servers)], 2)
    at = drawn.randrange(5, STEPS // 2)
    later = drawn.randrange(at + 20, STEPS - 60 if servers else STEPS)  # a slow worker may not reach the last steps
    faults = f"kill:rank={first}@step={at},kill:rank={second}@step={later}"
    done = subprocess.run([*line, "--inject", faults, "--run-dir", str(folder)], capture_output=True, text=True)
    events = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    found = []
    for event in events:
        recovery: dict[str, Any] | None = event.get("recovery")
        if recovery is not None:
            told = [f"injected: kill:rank={rank}@" for rank in recovery["lost"]]
            struck = max(one["monotonic_s"] for one in events if one.get("text", "").startswith(tuple(told)))
            found.append({"total": event["monotonic_s"] - struck, **recovery["seconds"]})
    if done.returncode:
        return found, f"lost ({done.stderr.strip().splitlines()[-1]})"
    struck = sum(str(event.get("text", "")).startswith("injected: ") for event in events)
    return found, "in place" if len(found) == 2 else f"{len(found)} of {struck} in place"


def main() -> None:
    """Print every recovery when it ends, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--servers", type=int, default=0)
    asked = parser.parse_args()
    line = [sys.executable, "-m", "hpcdl", "train", "--model", asked.model, "--data", asked.data]
    line += [
        "--strategy",
        asked.strategy,
        "--ranks",
        f"{WORKERS + asked.servers}",
        "--batch-size",
        "16",
        "--steps",
        f"{STEPS}",
        "--elastic",
        "--min-workers",
        "1",
    ]
    line += ["--checkpoint-every", "1s", "--profile", "none"]
    line += ["--servers", f"{asked.servers}"] if asked.servers else []
    line += [word for rule in find_strategy(asked.strategy).features.optimizers[:1] for word in ("--optimizer", rule)]
    line += ["--learning-rate", "0.005"] if asked.strategy == "async-msgd" else []
    drawn, found, ends = random.Random(asked.seed), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.runs):
            recoveries, end = run_once(line, Path(folder) / f"{number}", drawn, asked.servers)
            found += recoveries
            ends.append(end)
            for one in recoveries:
                print(", ".join(f"{part} {seconds:.2f}" for part, seconds in one.items()), flush=True)
            print(f"run {number}: {end}", flush=True)
    print(f"{ends.count('in place')} of {asked.runs} runs in place; {len(found)} recoveries")
    for part in found[0] if found else ():
        seconds = [one[part] for one in found]
        print(f"{part}: median {statistics.median(seconds):.2f} s, largest {max(seconds):.2f} s")


if __name__ == "__main__":
    main()

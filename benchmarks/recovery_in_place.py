"""How long a run that loses ranks takes to go on in place, and what of: two kills a run, at random steps and ranks.

    MPI4PY_MPIABI=openmpi python benchmarks/recovery_in_place.py --data SHARDS [--runs 6] [--model lenet] [--seed 0]

Needs Open MPI 5. Three ranks with `ring`, of which one is left at the end; a rank plants its own SIGKILL (`--inject`)
and says so right before. From that line of the journal to the end of the first step without it is what a recovery
takes; its parts are those that the journal has. A run that does not end with exit code 0 counts as lost, one that has
started new ranks as not in place.
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

RANKS, STEPS = 3, 240


def run_once(line: list[str], folder: Path, drawn: random.Random) -> tuple[list[dict[str, float]], str]:
    """Seconds of each recovery, with its parts; and how the run ended, in a word."""
    first, second = drawn.sample(range(RANKS), 2)
    at = drawn.randrange(5, STEPS // 2)
    later = drawn.randrange(at + 20, STEPS)
    faults = f"kill:rank={first}@step={at},kill:rank={second}@step={later}"
    done = subprocess.run([*line, "--inject", faults, "--run-dir", str(folder)], capture_output=True, text=True)
    events = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    found = []
    for event in events:
        recovery: dict[str, Any] | None = event.get("recovery")
        if recovery is not None:
            told = [f"injected: kill:rank={rank}@" for rank in recovery["lost"]]
            struck = max(one["at"] for one in events if one.get("text", "").startswith(tuple(told)))
            found.append({"total": event["at"] - struck, **recovery["seconds"]})
    if done.returncode:
        return found, f"lost ({done.stderr.strip().splitlines()[-1]})"
    return found, "in place" if len(found) == 2 else f"{len(found)} of 2 in place"


def main() -> None:
    """Print every recovery as it comes, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    line = [sys.executable, "-m", "hpcdl", "train", "--model", asked.model, "--data", asked.data, "--strategy", "ring"]
    line += ["--ranks", f"{RANKS}", "--batch-size", "16", "--steps", f"{STEPS}", "--elastic", "--min-workers", "1"]
    line += ["--checkpoint-every", "1s", "--profile", "none"]
    drawn, found, ends = random.Random(asked.seed), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.runs):
            recoveries, end = run_once(line, Path(folder) / f"{number}", drawn)
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

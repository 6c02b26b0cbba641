"""Share of a run's time spent on steps that count, while it loses a rank every minute and recovers in place.

    MPI4PY_MPIABI=openmpi python benchmarks/useful_time.py [--minutes 5] [--every 60] [--model emulated:lenet:0.1]

Needs Open MPI 5. One rank more starts than is lost, rank 0 is among the lost ones, and the batch stays the same. Useful
time is the number of steps between two losses times an undisturbed step of as many workers, relative to the time from
the journal's first step to its last. An undisturbed step is the median between two lines of the journal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

LEFT_EARLY = 75


def main() -> None:
    """Train for the given time, and print what the journal shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two losses")
    parser.add_argument("--model", default="emulated:lenet:0.1")
    asked = parser.parse_args()
    seconds, losses = 60 * asked.minutes, round(60 * asked.minutes / asked.every)
    faults = [f"kill:rank={rank}@time={(rank + 0.5) * asked.every:g}s" for rank in range(losses)]
    line = [sys.executable, "-m", "hpcdl", "train", "--model", asked.model, "--data", "synthetic:mnist@6000"]
    line += ["--strategy", "ring", "--ranks", f"{losses + 1}", "--batch-size", "16", "--steps", "1000000"]
    line += ["--elastic", "--min-workers", "1", "--checkpoint-every", "10s", "--profile", "none"]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        line += ["--time-limit", f"{seconds:g}s", "--inject", ",".join(faults), "--run-dir", str(run_dir)]
        ended = subprocess.run(line, capture_output=True, text=True, check=False)
        if ended.returncode != LEFT_EARLY:
            sys.exit(ended.stderr)
        show([json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()])


def show(events: list[dict[str, Any]]) -> None:
    """Print steps, losses and the share."""
    told, parts = [], [[]]
    for event in events:
        if event["kind"] == "step":
            told.append((event["step"], event["monotonic_s"]))
            parts[-1].append(told[-1])
        elif "recovery" in event:  # steps of fewer workers take longer from here on
            parts.append([])
    useful_s = 0.0
    for part in (part for part in parts if len(part) > 1):
        between = [(later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in pairwise(part)]
        step_s = statistics.median(between)
        useful_s += step_s * (part[-1][0] - part[0][0])
        print(f"{part[-1][0] - part[0][0]} steps of {1e3 * step_s:.1f} ms")
    steps, seconds = (last - first for first, last in zip(told[0], told[-1], strict=True))
    print(f"{steps} steps in {seconds:.1f} s: {100 * useful_s / seconds:.1f} % useful")
    recovered = [sum(event["recovery"]["seconds"].values()) for event in events if "recovery" in event]
    if recovered:
        print(f"{len(recovered)} recoveries in place, {statistics.median(recovered):.2f} s each in the median")


if __name__ == "__main__":
    main()

"""Time from the command to the first step of a training or script, beyond TensorFlow's import; in turn in one run.

    python benchmarks/start_up.py [--rounds 7] [--ranks 1,2] [--model lenet] [--data synthetic:mnist]

Each round imports TensorFlow in a new Python, both as `python -c "import tensorflow"` and as ranks do (with Keras,
without matplotlib and Python's garbage collector), and starts `hpcdl train` with each number of ranks. Measured are
the seconds from the start of the command to the end of the first step, including tracing and compiling; and the
processor time of the starting process, of its helpers, and of the busiest rank, which a busy machine disturbs less.
A script's `fit` of one step runs in Python alone and with `hpcdl run`: until its end, the time of the busiest rank.
Prints medians, and their excess over either import; the first round does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORTS = {
    "plain import": "import tensorflow",
    "a rank's import": "from hpcdl.supervision.runtime import import_tensorflow as load; load()",
}
SCRIPT = """
import sys, time
if len(sys.argv) > 1:
    import hpcdl
    hpcdl.init()
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer("sgd") if len(sys.argv) > 1 else "sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
print("ended", time.monotonic(), time.process_time(), flush=True)
"""
CLOCKS = ("seconds", "processor")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def imported(statement: str) -> tuple[float, float]:
    """Return seconds and processor time from the start of a Python to the end of an import."""
    began = time.monotonic()
    line = [sys.executable, "-P", "-c", f"{statement}; import time; print(time.monotonic(), time.process_time())"]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended, processor = subprocess.run(line, check=True, capture_output=True, text=True, env=quiet).stdout.split()
    return float(ended) - began, float(processor)


def scripted(ranks: int, folder: Path) -> tuple[float, float]:
    """Return seconds from the command to the end of a script's fit, and its busiest rank's processor time.

    Without ranks the script runs in Python alone.
    """
    script = folder / "script.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-P", *(["-m", "hpcdl", "run", "--ranks", str(ranks)] if ranks else []), str(script)]
    began = time.monotonic()
    ended = subprocess.run(line + ["distributed"] * bool(ranks), check=True, capture_output=True, text=True, cwd=folder)
    times = [text.split()[1:] for text in ended.stdout.splitlines() if text.startswith("ended ")]
    return max(float(time_s) for time_s, _ in times) - began, max(float(processor) for _, processor in times)


def processes() -> dict[int, tuple[int, float, float]]:
    """Return for each process: its parent, its own processor time, and that of the children that it waited for."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        ticks = [int(text) for text in fields[11:15]]
        found[int(path.parent.name)] = int(fields[1]), sum(ticks[:2]) * TICK_S, sum(ticks[2:]) * TICK_S
    return found


def spent_s(starter: int) -> float:
    """Return the processor time of `starter`, of its ended children, and of its busiest descendant."""
    known = processes()
    below: list[int] = []
    waiting = [starter]
    while waiting:
        parent = waiting.pop()
        children = [pid for pid, (above, _, _) in known.items() if above == parent]
        below, waiting = below + children, waiting + children
    return sum(known[starter][1:]) + max(known[pid][1] for pid in below)


def trained(arguments: list[str], run_dir: Path) -> tuple[float, float]:
    """Return seconds and processor time from the command to the end of the first step, without what follows."""
    began = time.monotonic()
    line = [sys.executable, "-P", "-m", "hpcdl", "train", *arguments, "--steps", "100000", "--run-dir", str(run_dir)]
    journal = run_dir / "metrics.jsonl"
    with (run_dir.parent / "log").open("w") as log, subprocess.Popen(line, stdout=log, stderr=log) as process:
        try:
            while not (journal.exists() and '"kind": "step"' in journal.read_text()):
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(line)}:\n{Path(log.name).read_text()}")
                time.sleep(0.002)
            processor = spent_s(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
    lines = journal.read_text().splitlines()
    step = next(event for event in map(json.loads, lines) if event["kind"] == "step")
    return step["monotonic_s"] - began, processor


def main() -> None:
    """Measure in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="synthetic:mnist")
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="hpcdl-start-up-") as folder:
        for number in range(given.rounds + 1):
            one = {name: imported(statement) for name, statement in IMPORTS.items()}
            one["a script"] = scripted(0, Path(folder))
            for ranks in given.ranks.split(","):
                strategy = "single" if ranks == "1" else "ring"
                words = ["--model", given.model, "--data", given.data, "--strategy", strategy, "--ranks", ranks]
                one[f"{ranks} ranks"] = trained(words, Path(folder) / f"{number}-{ranks}")
                one[f"script, {ranks} ranks"] = scripted(int(ranks), Path(folder))
            for name, times in one.items():
                found.setdefault(name, []).extend([times] if number else [])
    for place, clock in enumerate(CLOCKS):
        print(f"{clock}, median of {given.rounds}")
        for name, times in found.items():
            own = [pair[place] for pair in times]
            beyond = [
                f"{statistics.median(a - b[place] for a, b in zip(own, found[base], strict=True)):6.2f} beyond {base}"
                for base in IMPORTS
                if name not in IMPORTS
            ]
            print(
                f"  {name:16}{statistics.median(own):6.2f} ({min(own):.2f} to {max(own):.2f}){' ' * bool(beyond)}",
                end="",
            )
            print(",".join(beyond))


if __name__ == "__main__":
    main()

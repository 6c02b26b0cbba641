"""Peak resident memory of a rank that exchanges gradients, beyond that of `single` with the same batch.

    python benchmarks/exchange_memory.py [--steps 6] [--models alexnet,resnet50]

The aim is at most the gradients' bytes plus 128 MiB. Prints the larger of two ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {"alexnet": (16, "227x227x3"), "resnet50": (8, "224x224x3"), "lenet": (16, "28x28x1")}
"""Batch and shape; LeNet serves to try this benchmark."""
ROOM_MIB = 128


def record(folder: Path, model: str, batch: int, shape: str, strategy: str, steps: int) -> dict[str, object]:
    run = folder / f"{model}-{strategy}"
    command = [
        sys.executable, "-m", "hpcdl", "train", "--model", model, "--data", f"synthetic:{shape}:1000",
        "--batch-size", str(batch), "--steps", str(steps), "--strategy", strategy,
        "--ranks", "1" if strategy == "single" else "2", "--profile", "none", "--run-dir", str(run),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads((run / "record.json").read_text())
    return found


def peak_mib(found: dict[str, object]) -> float:
    return max(rank["peak_memory_bytes"] for rank in found["rank_records"]) / 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--models", default="alexnet,resnet50")
    chosen = parser.parse_args()
    steps = chosen.steps
    print("model     strategy   peak MiB  over single  allowed")
    with tempfile.TemporaryDirectory() as name:
        for model in chosen.models.split(","):
            batch, shape = CASES[model]
            alone = peak_mib(record(Path(name), model, batch, shape, "single", steps))
            print(f"{model:<10}{'single':<10}{alone:9.0f}")
            for strategy in ("ring", "auto"):
                found = record(Path(name), model, batch, shape, strategy, steps)
                allowed = found["parameters"] * 4 / 1024**2 + ROOM_MIB
                peak = peak_mib(found)
                print(f"{model:<10}{strategy:<10}{peak:9.0f}{peak - alone:13.0f}{allowed:9.0f}", flush=True)


if __name__ == "__main__":
    main()

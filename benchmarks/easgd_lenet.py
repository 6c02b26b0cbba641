"""Real LeNet on shaped hosts: rounds to an accuracy, and the parts of a step's time, with `easgd` and sync-easgd 1-3.

    python -m benchmarks.easgd_lenet --hosts 4 --rate 1gbit --data digits-shards [--methods LABEL,LABEL]

As root, in the lab's namespaces: one `hpcdl train` rank per worker host, and one more host for the server of `easgd`.
LeNet's weights are 1.64 MiB. Every method trains with the same learning rate and seed until the center classifies 97 %
of the held-out digits correctly, evaluated after each epoch. The parts are means per step over the workers, from the
run's own record.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.shaped_hosts import run_ranks
from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from hpcdl.core.records.run_record import RunRecord, read_record

METHODS: dict[str, tuple[str, ...]] = {
    "easgd": ("easgd",),
    **{f"sync-easgd {variant}": ("sync-easgd", "--variant", variant) for variant in "123"},
    **{f"sync-easgd 3 {half}": ("sync-easgd", "--variant", "3", "--compress", half) for half in ("fp16", "bf16")},
}
COMMUNICATION = ("wait", "exposed_communication")
TARGET = 0.97


def train(options: argparse.Namespace, data: Path, strategy: tuple[str, ...], run_dir: Path) -> RunRecord:
    """Run one training; every host trains with one thread, as all of them share this machine."""
    servers = 1 if strategy[0] == "easgd" else 0
    command = [
        sys.executable, "-m", "hpcdl", "train", "--model", options.model, "--data", str(data), "--strategy",
        *strategy, "--batch-size", "16", "--epochs", str(options.epochs), "--target-accuracy", str(TARGET),
        "--learning-rate", str(options.learning_rate), "--deterministic", "--run-dir", str(run_dir),
    ]  # fmt: skip
    run_ranks(options.hosts + servers, options.rate, find_mpiexec().path, command)
    return read_record(run_dir)


def main() -> None:
    """Run every method once and print its parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--model", default="lenet", help="emulated:lenet:0.006 waits, on no core, in computing's place")
    parser.add_argument("--methods", default=",".join(METHODS), help="may name one several times, to take turns")
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    # In the checkout, which the hosts see at the same path.
    with tempfile.TemporaryDirectory(prefix=".easgd-lenet-", dir=Path.cwd()) as name:
        data = shutil.copytree(options.data, Path(name) / "data")
        for number, label in enumerate(options.methods.split(",")):
            record = train(options, data, METHODS[label], Path(name) / str(number))
            step_s = sum(record.parts.values())
            share = sum(record.parts[part] for part in COMMUNICATION) / step_s
            parts = ", ".join(f"{part} {1e3 * seconds:.1f}" for part, seconds in record.parts.items())
            reached = next((p.step for p in record.history if (p.val_accuracy or 0) >= TARGET), "never")
            print(
                f"{label:18s} {reached} rounds to {TARGET:.0%}, step {1e3 * step_s:6.1f} ms, waiting and communicating "
                f"{share:4.0%} ({parts} ms)",
                flush=True,
            )


if __name__ == "__main__":
    main()

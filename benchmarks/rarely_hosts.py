"""Time and traffic to an accuracy on shaped hosts: an exchange in every step beside strategies that exchange rarely.

    python -m benchmarks.rarely_hosts --rate 100mbit [--task text] [--hosts 8] [--cores 0.23] [--out FOLDER]

As root, on a Slurm cluster of the lab's hosts, one worker per host: a study in which each strategy first tries some
learning rates (`--rates`), then trains until --target. `--out` keeps the study, for `hpcdl report`. The time excludes
the start of ranks. `--cores` is each host's share of this machine's processors, so that hosts do not take turns on
them. The tasks: LeNet on the digits, and a small LSTM that predicts the next character of hpcdl's pages.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

import toml

from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.core.units import format_bytes
from tests.conftest import DIGITS, ROOT
from tests.lab.desk import Desk
from tests.lab.hosts import lab_folder
from tests.lab.needs import missing
from tests.lab.slurm import SlurmLab

METHODS = ("ring", "sync-easgd", "local-sgd", "slowmo", "diloco", "streaming-diloco", "streaming-diloco:fp4")
"""Strategies, with the form in which changes are sent if they are compressed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A learning task: the network, and its target accuracy."""

    model: str
    target: float
    rates: tuple[float, ...]
    epochs: int
    tried_epochs: int


TASKS = {
    "digits": Task(model="lenet", target=0.97, rates=(0.01, 0.02, 0.03), epochs=60, tried_epochs=12),
    "text": Task(
        model=f"{ROOT}/benchmarks/text_network.py:build", target=0.35, rates=(0.3, 1.0), epochs=12, tried_epochs=3
    ),
}


def make_data(task: str, desk: Desk) -> None:
    """Write the task's samples as shards in the folder `data` of the desk."""
    words: list[str | Path] = ["shard", DIGITS, "data", "--image-size", "28"]
    if task == "text":
        from benchmarks import text_network  # imports Keras

        text_network.write_samples(ROOT / "docs", desk.folder / "text.npz")
        words = ["shard", "text.npz", "data", "--input", "text", "--target", "next", "--target-kind", "class"]
    finished = desk.hpcdl(*words, "--split", "train=0.8,val=0.2", "--seed", "1")
    if finished.code:
        raise SystemExit(finished.err)


def study_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the study file's content."""
    task, rates = TASKS[options.task], options.rates
    axes = ["strategy", "optimizer", "compress"]
    study: dict[str, object] = {
        "name": "rarely", "repeats": options.repeats, "retries": 0,
        "matrix": {
            "model": [task.model], "data": ["data"], "batch-size": [16], "nodes": [options.hosts],
            "ranks-per-node": [1], "strategy": [method.partition(":")[0] for method in options.methods],
            "optimizer": ["sgd" if method == "sync-easgd" else "momentum" for method in options.methods],
            "compress": [method.partition(":")[2] or "none" for method in options.methods], "zip": [axes],
        },
        "train": {"epochs": options.epochs or task.epochs, "target-accuracy": options.target or task.target},
    }  # fmt: skip
    if rates and len(rates) == len(options.methods):
        study["matrix"] |= {"learning-rate": rates, "zip": [[*axes, "learning-rate"]]}  # type: ignore[operator]
    else:
        study["choose"] = {"learning-rate": list(rates or task.rates), "epochs": task.tried_epochs}
    return study


def swept(options: argparse.Namespace, folder: Path) -> None:
    """Run the study, and leave it in `folder`."""
    problem = missing("slurm")
    if problem:
        raise SystemExit(problem)
    with lab_folder() as place:
        lab = SlurmLab(place, num_nodes=options.hosts, rate=options.rate, cores=options.cores)
        try:
            lab.start()
            desk = Desk(lab, lab.shared / "desk")
            desk.folder.mkdir()
            make_data(options.task, desk)
            (desk.folder / "study.toml").write_text(toml.dumps(study_of(options)))
            inside = ["salloc", "--quiet", f"--nodes={options.hosts}", "--exclusive", "--time=600"]
            line = [*inside, *desk.line("sweep", "study.toml", "--out", "study")]
            subprocess.run(lab.command(line, cwd=desk.folder, env=desk.environment), check=False)
            shutil.copytree(desk.folder / "study", folder)
        finally:
            lab.stop()


def told(method: str, records: list[RunRecord]) -> str:
    """Return a table row: what a method's runs needed to reach the target."""
    reached = [record for record in records if record.seconds_to_target is not None]
    sent = [(record.bytes_sent_per_step or 0.0) * record.steps for record in records]
    accuracy = statistics.median(record.history[-1].val_accuracy or 0.0 for record in records)
    times = sorted(record.seconds_to_target or 0.0 for record in reached)
    spread = f"{statistics.median(times):.1f} s ({times[0]:.1f} to {times[-1]:.1f})" if times else "never"
    steps = statistics.median(record.steps for record in records)
    return (
        f"{method:20s} rate {records[0].config['learning-rate']}: {len(reached)} of {len(records)} reach it, {spread}, "
        f"{steps:.0f} steps, {format_bytes(int(statistics.median(sent)))} sent a worker, accuracy {accuracy:.3f}"
    )


def main() -> None:
    """Run the study and print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--cores", type=float, default=0.23)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--target", type=float)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rates", nargs="+", type=float, help="to try; or as many as methods, one for each")
    parser.add_argument("--out", type=Path, help="folder to make")
    options = parser.parse_args()
    with lab_folder() as own:
        folder = options.out or own / "study"
        swept(options, folder)
        runs: dict[str, list[RunRecord]] = {method: [] for method in options.methods}
        for path in sorted((folder / "runs").glob("*/record.json")):
            record = read_record(path.parent)
            form = record.config["compress"]
            runs[record.strategy if form == "none" else f"{record.strategy}:{form}"].append(record)
        for method, records in runs.items():
            print(told(method, records) if records else f"{method}: no run has ended", flush=True)


if __name__ == "__main__":
    main()

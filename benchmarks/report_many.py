"""`hpcdl report` and `hpcdl runs` on many runs: wall and processor seconds, and peak memory.

    python benchmarks/report_many.py [--runs 10000] [--repeats 5] [--steps 300] [--folder DIR]

Makes run folders as `hpcdl train` leaves them: record.json with every setting, rank and step, metrics.jsonl, run.toml,
ranks/. Five strategies, three networks, 1 to 32 workers, two batches, learning rates, precisions and machines; repeats;
every 97th run failed. Each command runs once before it is measured, so that files are cached; medians are printed with
minimum and maximum. Runs in `--folder` stay there, and a later call uses them again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdl.config.load import Layer, as_toml_values, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.records.run_record import FILE_NAME, PARTS, HistoryPoint, RankRecord, RunRecord
from hpcdl.core.statistics import quantiles
from hpcdl.core.storage.files import toml_text

AXES: Mapping[str, Sequence[Any]] = {
    "machine": ("knl", "skx"),
    "precision": ("float32", "mixed_bfloat16"),
    "model": ("lenet", "cifar10-quick", "resnet50"),
    "strategy": ("ring", "tree", "ps", "sync-easgd", "async-easgd"),
    "batch-size": (16, 64),
    "learning-rate": (0.01, 0.1),
    "workers": (1, 2, 4, 8, 16, 32),
}
SERVED = ("ps", "async-easgd")
SHARES = (0.02, 0.7, 0.08, 0.12, 0.06, 0.02)
"""Shares of a step, by part."""
PARAMETERS = {"lenet": 431_080, "cifar10-quick": 145_578, "resnet50": 25_557_032}
EPOCHS = 6
FAILED_ONE_IN = 97
QUANTILES = {"0%": 0.0, "5%": 0.05, "25%": 0.25, "50%": 0.5, "75%": 0.75, "95%": 0.95, "100%": 1.0}


def make(folder: Path, runs: int, steps: int) -> None:
    """Make `runs` run folders in `folder`; the same call makes the same ones."""
    settings = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    for number in range(runs):
        repeat, place = divmod(number, len(settings))
        make_run(folder, number, settings[place], repeat + 1, steps)


def make_run(folder: Path, number: int, chosen: Mapping[str, Any], repeat: int, steps: int) -> None:
    """Make one run with the `chosen` values of AXES."""
    record = record_of(number, chosen, repeat, steps, str(folder))
    run_dir = Path(record.config["run-dir"])
    (run_dir / "ranks").mkdir(parents=True)
    (run_dir / FILE_NAME).write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    events = [{"kind": "epoch", "at": 0.0, **dataclasses.asdict(point)} for point in record.history]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (run_dir / "run.toml").write_text(toml_text(record.config))
    (run_dir / "ranks" / "launcher.log").touch()


def record_of(number: int, chosen: Mapping[str, Any], repeat: int, steps: int, folder: str) -> RunRecord:
    """Return the record of such a run."""
    noise = random.Random(number)
    workers, batch, servers = chosen["workers"], chosen["batch-size"], int(chosen["strategy"] in SERVED)
    mean = (
        0.01 * (1 + 0.1 * workers.bit_length()) * (batch / 16) ** 0.9 * (1 + AXES["machine"].index(chosen["machine"]))
    )
    times = [mean * noise.gauss(1, 0.02) for _ in range(steps)]
    step, sent = statistics.fmean(times), 4.0 * PARAMETERS[chosen["model"]]
    failed = number % FAILED_ONE_IN == 0
    ranks = [rank_of(rank, chosen, step, sent, noise) for rank in range(workers + servers)]
    seconds = sum(times)
    history = () if failed else history_of(steps, seconds, noise)
    return RunRecord(
        status="failed" if failed else "finished", message="rank 0 was killed by signal 9" if failed else "",
        started_at="2026-03-14T09:26:53+0000", finished_at="2026-03-14T09:36:53+0000",
        strategy=chosen["strategy"], model=chosen["model"], data="digits", num_samples=1438,
        parameters=PARAMETERS[chosen["model"]], gradient_bytes=int(sent), data_checksum="84e9eb2086290855",
        ranks=workers + servers, workers=workers, servers=servers, nodes=len({item.host for item in ranks}),
        ranks_per_node=min(2, workers + servers), hosts=tuple(dict.fromkeys(item.host for item in ranks)),
        intra_op_threads=32, inter_op_threads=2, batch_per_rank=batch, global_batch=batch * workers, steps=steps,
        warmup_steps=3, step_seconds=tuple(times),
        step_seconds_quantiles=dict(zip(QUANTILES, quantiles(times[3:], [*QUANTILES.values()]), strict=True)),
        images_per_second=None if failed else batch * workers / step, seconds_per_epoch=seconds / EPOCHS,
        seconds_total=seconds, parts=parts_of(step, noise), imbalance_seconds=noise.uniform(0, 0.02) * step,
        bytes_sent_per_step=sent, bytes_received_per_step=sent, history=history, rank_records=tuple(ranks),
        loss=history[-1].loss if history else None, accuracy=history[-1].accuracy if history else None,
        machine=chosen["machine"], processor=f"Processor of {chosen['machine']}", cores_per_node=64,
        software={"hpcdl": "0.2.0", "python": "3.11.2", "mpi": "MPICH 5.0.2", "tensorflow": "2.21.0", "keras": "3.15.1",
                  "numpy": "2.4.6", "h5py": "3.14.0"},
        environment={"OMP_NUM_THREADS": "32", "TF_NUM_INTEROP_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "32"},
        config=config_of(number, chosen, repeat, folder), study="many", repeat=repeat,
    )  # fmt: skip


def rank_of(rank: int, chosen: Mapping[str, Any], step: float, sent: float, noise: random.Random) -> RankRecord:
    """Return a worker, or the server after the workers; two on each node."""
    workers = chosen["workers"]
    return RankRecord(
        rank=rank, host=f"{chosen['machine']}{rank // 2}", role="worker" if rank < workers else "server",
        parts=parts_of(step, noise) if rank < workers else {},
        bytes_sent_per_step=sent, bytes_received_per_step=sent, rounds_per_step=2.0 * workers - 1,
        round_bytes_per_step=sent * noise.uniform(1, 1.01), peak_memory_bytes=noise.randrange(2**29, 2**30),
        busy_seconds_per_step=None if rank < workers else 0.4 * step, details={"followed_steps": 0},
    )  # fmt: skip


def history_of(steps: int, seconds: float, noise: random.Random) -> tuple[HistoryPoint, ...]:
    """Return an evaluation after each epoch."""
    return tuple(
        HistoryPoint(
            epoch=float(epoch), step=epoch * steps // EPOCHS, seconds=epoch * seconds / EPOCHS,
            loss=noise.gauss(2 / epoch, 0.01), accuracy=noise.uniform(0.97, 0.99) - 0.5 / epoch,
            val_loss=noise.gauss(2.1 / epoch, 0.01), val_accuracy=noise.uniform(0.96, 0.98) - 0.5 / epoch,
            val_metrics={"accuracy": noise.random(), "top5_accuracy": noise.random()},
        )
        for epoch in range(1, EPOCHS + 1)
    )  # fmt: skip


def config_of(number: int, chosen: Mapping[str, Any], repeat: int, folder: str) -> dict[str, Any]:
    """Return every setting of `hpcdl train`, as a record holds them."""
    name = f"{number:05d}-{chosen['strategy']}-{chosen['workers']}w-{chosen['batch-size']}b-r{repeat}"
    own = {key: value for key, value in chosen.items() if key not in ("machine", "workers")}
    ranks = chosen["workers"] + (chosen["strategy"] in SERVED)
    return {**DEFAULTS, **own, "data": "digits", "ranks": ranks, "seed": repeat, "run-dir": f"{folder}/{name}"}


DEFAULTS = as_toml_values(
    load(TrainConfig, [Layer(origin="benchmark", values={"model": "lenet", "data": "digits", "epochs": EPOCHS})]).config
)


def parts_of(step: float, noise: random.Random) -> dict[str, float]:
    """Return the parts of a step, which add up to it."""
    shares = [share * noise.gauss(1, 0.02) for share in SHARES]
    return {name: step * share / sum(shares) for name, share in zip(PARTS, shares, strict=True)}


def measured(arguments: Sequence[str]) -> dict[str, float]:
    """Return wall seconds, processor seconds (with children) and peak memory of a process, in MiB."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcdl", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"hpcdl {' '.join(arguments)} ended with {process.returncode}")
    return {"clock_s": seconds, "processor_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}


@contextlib.contextmanager
def many_runs(folder: Path | None, runs: int, steps: int) -> Iterator[Path]:
    """Yield a folder of `runs` runs: `folder`, or one that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hpcdl-report-many-") as scratch:
        study = (folder or Path(scratch)) / f"{runs}x{steps}"
        if not study.exists():
            make(study, runs, steps)
        yield study


def main() -> None:
    """Measure both commands, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with many_runs(chosen.folder, chosen.runs, chosen.steps) as study, tempfile.TemporaryDirectory() as out:
        for command in (["runs", str(study)], ["report", str(study), "--out", out]):
            _, *found = [measured(command) for _ in range(1 + chosen.repeats)]
            told = []
            for key in found[0]:
                values = [item[key] for item in found]
                told.append(f"{key} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
            print(f"hpcdl {command[0]} on {chosen.runs:,} runs: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()

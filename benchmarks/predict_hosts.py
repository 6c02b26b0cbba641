"""Predictions for eight hosts from one, two and four: real runs on shaped hosts, each beside its prediction.

    python -m benchmarks.predict_hosts --journal FILE.jsonl [--minutes 60] [--only lenet] [--runs 16]

Needs root (tests/lab's hosts). Real LeNet and CIFAR-10 quick, each host with a share of a core, and emulated ResNet-50,
AlexNet and LeNet (`--model emulated:...`: computing is a wait), over links of 1 Gbit/s, of 100 Mbit/s, and of 100
Mbit/s and 1 ms; ring, halving-doubling, ps with 1 and 4 servers on their own hosts, and sync-easgd: 80 points. In
each setting, one run on one worker and each strategy on 2 and 4 are the evidence, as `hpcdl predict` takes it; the run
on 8 is the truth. ResNet-50's and AlexNet's links have half a gigabit: at more, the two cores could not carry what
eight hosts send, and would be measured instead of the links.

Every run is written to the journal, one JSON line. With `--minutes` the script stops in time with exit code 75; the
same command continues where the journal ends. The points of complete settings are printed at the end: median and worst
error of the step's seconds, and the share of 90 % intervals that hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shaped_hosts import run_ranks
from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from hpcdl.core.records.run_record import FILE_NAME, RunRecord, from_json
from hpcdl.core.storage.files import read_json
from hpcdl.predict.evidence import gather_evidence
from hpcdl.predict.forecast import Forecast
from hpcdl.report.runs.run import Run, from_record

STOPPED_EARLY = 75
TRUTH, EVIDENCE = 8, (2, 4)
"""Numbers of workers."""
STRATEGIES = (("ring", 0), ("halving-doubling", 0), ("ps", 1), ("ps", 4), ("sync-easgd", 0))
SHARE = 0.15
"""Share of a core per computing host: twelve hosts fit on two cores."""
LIMIT_S = 580.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same while the strategy and the number of workers vary."""

    rate: str
    model: str
    data: str
    batch_size: int
    steps: int = 30
    delay_ms: float = 0.0

    @property
    def emulated(self) -> bool:
        """Whether computing is a wait that uses no core."""
        return self.model.startswith("emulated:")

    @property
    def name(self) -> str:
        """The setting in words."""
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{self.model}, batch {self.batch_size}, {self.rate}{delay}"


MNIST, CIFAR, IMAGENET = "synthetic:mnist@6400", "synthetic:cifar10@6400", "synthetic:imagenet@640"
SETTINGS = (
    *(Setting(rate=rate, model="lenet", data=MNIST, batch_size=batch)
      for rate in ("1gbit", "100mbit") for batch in (16, 64)),
    *(Setting(rate=rate, model="cifar10-quick", data=CIFAR, batch_size=batch)
      for rate in ("1gbit", "100mbit") for batch in (8, 32)),
    *(Setting(rate="100mbit", model=f"emulated:lenet:{wait}:3%", data=MNIST, batch_size=16, delay_ms=delay)
      for delay in (0.0, 1.0) for wait in ("0.1s", "0.4s")),
    *(Setting(rate="500mbit", model=f"emulated:resnet50:{wait}:3%", data=IMAGENET, batch_size=4, steps=7)
      for wait in ("1.4s", "4s")),
    *(Setting(rate="500mbit", model=f"emulated:alexnet:{wait}:3%", data=IMAGENET, batch_size=4, steps=8)
      for wait in ("1.2s", "6s")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One run."""

    setting: Setting
    strategy: str
    servers: int
    workers: int

    @property
    def key(self) -> dict[str, Any]:
        """The run's key in the journal."""
        own = {"strategy": self.strategy, "servers": self.servers, "workers": self.workers}
        return dataclasses.asdict(self.setting) | own


@dataclass(frozen=True, kw_only=True)
class HostPoint:
    """One prediction of the step's seconds for eight workers."""

    setting: Setting
    strategy: str
    servers: int
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Return the relative error."""
        return self.predicted / self.measured - 1


def runs_of(setting: Setting) -> Iterator[Wanted]:
    """Yield one run on one worker, by ring; then each strategy on more."""
    yield Wanted(setting=setting, strategy="ring", servers=0, workers=1)
    for strategy, servers in STRATEGIES:
        for workers in (*EVIDENCE, TRUTH):
            yield Wanted(setting=setting, strategy=strategy, servers=servers, workers=workers)


def train(wanted: Wanted) -> dict[str, Any]:
    """Return the record of one run; every worker and server has its own host."""
    setting = wanted.setting
    servers = ["--servers", str(wanted.servers)] if wanted.servers else []
    with tempfile.TemporaryDirectory(prefix=".predict-hosts-", dir=Path.cwd()) as name:  # the hosts see it at this path
        run_dir = Path(name) / "run"
        command = [
            sys.executable, "-m", "hpcdl", "train", "--model", setting.model, "--data", setting.data, "--strategy",
            wanted.strategy, *servers, "--batch-size", str(setting.batch_size), "--steps", str(setting.steps),
            "--profile", "none", "--run-dir", str(run_dir),
        ]  # fmt: skip
        cores = 0.0 if setting.emulated else SHARE
        num_hosts = wanted.workers + wanted.servers
        mpiexec = find_mpiexec().path
        run_ranks(num_hosts, setting.rate, mpiexec, command, LIMIT_S, cores=cores, delay_ms=setting.delay_ms)
        record: dict[str, Any] = read_json(run_dir / FILE_NAME)
        return record


def points_of(setting: Setting, records: dict[str, dict[str, Any]]) -> list[HostPoint]:
    """Return the setting's five points, once all its runs exist."""
    found = {wanted: records.get(_text(wanted.key)) for wanted in runs_of(setting)}
    if any(record is None for record in found.values()):
        return []
    runs = {wanted: _as_run(record, wanted) for wanted, record in found.items() if record is not None}
    small = [run for wanted, run in runs.items() if wanted.workers < TRUTH]
    evidence = gather_evidence(small, None)[0]
    forecast = Forecast(evidence, None)
    points = []
    for wanted, run in runs.items():
        if wanted.workers == TRUTH and run.images_per_second:
            job = evidence.at(wanted.strategy, run.nodes, wanted.workers, wanted.servers)
            step = forecast.predict(job).step_seconds
            measured = run.global_batch / run.images_per_second
            points.append(HostPoint(setting=setting, strategy=wanted.strategy, servers=wanted.servers,
                                    measured=measured, predicted=step.mean, low=step.low, high=step.high))  # fmt: skip
    return points


def _text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _as_run(record: dict[str, Any], wanted: Wanted) -> Run:
    name = f"{wanted.strategy}-{wanted.servers}-{wanted.workers}"
    return from_record(from_json(RunRecord, record), name)


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {_text(row["key"]): row["record"] for row in rows}


def tell(points: list[HostPoint]) -> None:
    """Print each point, and the summary of all."""
    for point in points:
        inside = "inside" if point.low <= point.measured <= point.high else "outside"
        print(
            f"{point.setting.name}: {point.strategy}/{point.servers} on {TRUTH} took {point.measured:.4g} s, predicted"
            f" {point.predicted:.4g} [{point.low:.4g}, {point.high:.4g}] ({100 * point.error:+.1f} %, {inside})"
        )
    if points:
        errors = [abs(point.error) for point in points]
        held = sum(point.low <= point.measured <= point.high for point in points)
        print(
            f"{len(points)} points: median error {100 * statistics.median(errors):.1f} %, worst"
            f" {100 * max(errors):.1f} %, {held} of {len(points)} in their 90 % intervals"
        )


def main() -> int:
    """Make the runs that the journal lacks, then print the points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=24 * 60.0)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--runs", type=int, default=10_000, help="make at most so many runs")
    options = parser.parse_args()
    deadline, longest_s = time.monotonic() + 60 * options.minutes, 60.0
    chosen = [setting for setting in SETTINGS if options.only in setting.name]
    records, made = read_journal(options.journal), 0
    stopped = False
    for wanted in (item for setting in chosen for item in runs_of(setting)):
        if _text(wanted.key) in records:
            continue
        if made >= options.runs or time.monotonic() + longest_s > deadline:
            stopped = True
            break
        began = time.monotonic()
        record = train(wanted)
        longest_s, made = max(longest_s, time.monotonic() - began), made + 1
        records[_text(wanted.key)] = record
        with options.journal.open("a") as file:
            file.write(json.dumps({"key": wanted.key, "record": record}) + "\n")
        print(f"{wanted.setting.name}: {wanted.strategy}/{wanted.servers} on {wanted.workers}: {record['status']},"
              f" {record['images_per_second']} images/s, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    tell([point for setting in chosen for point in points_of(setting, records)])
    if stopped:
        print(f"stopped with {len(records)} runs in {options.journal}; the same command continues")
    return STOPPED_EARLY if stopped else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs of LeNet that lose ranks at random, again and again, compared with an undisturbed run.

    python -m tests.rank.survival --data SHARDS [--mpi LIBRARY] [--ranks 2] [--runs 8] [--strikes 12] [--seed 0]
                                      [--strategy NAME] [--servers 2] [--nodes srun|ssh]

`--mpi`: the file of an MPI library; without it mpi4py chooses. With `--servers` that many of the ranks are servers, and
are struck as workers are; the strategy is then `ps`, else `ring`, unless `--strategy` names another. With `--nodes`
each rank has a node of the lab's Slurm cluster. There `srun` starts it, or `mpiexec` over ssh, whose ranks may continue
in place. From time to time a thread kills ranks (SIGKILL) or stops one (SIGSTOP): one, two at once, or one more during
a recovery. Each run must end with exit code 0, take every sample of each epoch once, and reach the accuracy of the
undisturbed run within the noise of its held-out samples; asynchronous methods and EASGD need not take every sample.
Runs that fail are reported, and their folders stay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcdl.strategies.table import find_strategy
from tests.conftest import CommandLine, finish
from tests.lab.nodes import OnNodes, on_nodes
from tests.training_runs import PLANTED, SHORT, record_of, steps_done

BATCH = 48
"""Divisible by one to four workers."""
PER_EPOCH, HELD_OUT = 1437 // BATCH, 360
"""Steps of an epoch of the digits, and samples in their split `val`."""
STALL_S = 30.0
"""Seconds after which a stopped rank counts as lost."""
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_RANK_PROGRAM = b"hpcdl.rank.main"


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A rank that was killed or stopped `at` that time."""

    at: float
    rank: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """How `failures` were recovered from, and the seconds from the first failure to the end of the next step."""

    way: str
    failures: int
    seconds: float
    parts: dict[str, float]


@dataclass(kw_only=True)
class Survival:
    """The result of a run; it has survived if it has no `problems`."""

    seed: int
    strikes: list[Strike] = field(default_factory=list)
    recovered: list[Recovered] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    load: float = 0.0


def ranks_of(run_dir: Path) -> dict[int, int]:
    """Return the run's present rank processes, by rank. A single one is started without MPI and has no number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if _RANK_PROGRAM in words[:4] and os.fsencode(run_dir) in words:  # not srun or mpiexec, which start it
                variables = dict(
                    text.partition("=")[::2] for text in (folder / "environ").read_bytes().decode().split("\0")
                )
                number = next((variables[name] for name in _RANK if name in variables), "0")
                found[int(number)] = int(folder.name)
    return found


class Striker(threading.Thread):
    """Strike the run in `run_dir` of `steps` steps `num` times, in equal parts of it; the last time in its last epoch.

    The journal has only some of the steps, but every epoch's end; on an idle machine an epoch takes 0.15 s.
    """

    def __init__(self, run_dir: Path, steps: int, num: int, drawn: random.Random) -> None:
        super().__init__(name="striker", daemon=True)
        self.strikes: list[Strike] = []
        self.over = threading.Event()
        self._run_dir, self._drawn = run_dir, drawn
        part = steps / num
        self._moments = [round(part * (number + drawn.uniform(0.2, 0.9))) for number in range(num - 1)]
        self._last = steps - PER_EPOCH

    def run(self) -> None:
        """Strike until the run is over."""
        for moment, most_later_s in [*((moment, 0.5) for moment in self._moments), (self._last, 0.05)]:
            while steps_done(self._run_dir) < moment:
                if self.over.wait(0.02):
                    return
            self.over.wait(self._drawn.uniform(0, most_later_s))
            how = self._drawn.random()
            if how < 0.08:
                self._strike(1, "stop")
            else:
                self._strike(2 if how < 0.2 else 1, "kill")
            if how > 0.85:
                self.over.wait(self._drawn.uniform(0, 4))
                self._strike(1, "kill")

    def _strike(self, num: int, kind: str) -> None:
        while not (there := ranks_of(self._run_dir)):
            if self.over.wait(0.05):
                return
        if len(there) == 1:
            kind = "kill"  # no rank would be left to notice a stopped one
        for rank in self._drawn.sample(sorted(there), min(num, len(there))):
            with suppress(ProcessLookupError):
                now_s = time.time()
                os.kill(there[rank], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                self.strikes.append(Strike(at=now_s, rank=rank, kind=kind))


def recoveries(events: Sequence[Mapping[str, Any]], strikes: Sequence[Strike]) -> Iterator[Recovered]:
    """Yield each recovery of a run from its journal. A recovery that no strike caused has no failures."""
    left, waiting, began, parts = list(strikes), list[Strike](), 0.0, dict[str, float]()
    for event in events:
        at = event["at"]
        if "recovery" in event:
            lost = event["recovery"]["lost"]
            struck = [strike for strike in left if strike.at < at and strike.rank in lost]
            yield _recovered("in place", struck, at, event["recovery"]["seconds"])
            left = [strike for strike in left if strike not in struck]
        elif event["kind"] == "message" and (
            " continue after step " in event["text"] or " continue from " in event["text"]
        ):
            waiting += [strike for strike in left if strike.at < at]
            left = [strike for strike in left if strike.at >= at]
            began, parts = at, {"end": at - min((strike.at for strike in waiting), default=at)}
        elif parts and event["kind"] == "start":
            parts["start"] = at - began
        elif "start" in parts and event["kind"] in ("step", "epoch"):
            parts["step"] = at - began - parts["start"]
            yield _recovered("new ranks", waiting, at, parts)
            waiting, parts = [], {}


def _recovered(way: str, struck: Sequence[Strike], at: float, parts: dict[str, float]) -> Recovered:
    """Return a recovery, marked if a rank was stopped, because only --stall-timeout finds that."""
    stopped = ", one was stopped" if any(strike.kind == "stop" for strike in struck) else ""
    first = min((strike.at for strike in struck), default=at)
    return Recovered(way=way + stopped, failures=len(struck), seconds=at - first, parts=dict(parts))


def samples_of(folder: Path) -> dict[int, list[int]]:
    """Return the checksums of each step's samples in its last try, from the ranks' records of what they got, and when.

    The last try includes the ranks whose share of the batch has the size of the latest record.
    """
    notes: dict[int, dict[int, list[tuple[float, list[int]]]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # otherwise a rank was killed in the middle of a line
                note = json.loads(line)
                notes[note["step"]][int(path.stem[5:])].append((note["at"], note["images"]))
    found = {}
    for step, by_rank in notes.items():
        share = len(max(note for tries in by_rank.values() for note in tries)[1])
        last = [[note for note in tries if len(note[1]) == share][-1:] for tries in by_rank.values()]
        took_part = sorted(note for notes in last for note in notes)[-(BATCH // share) :]
        found[step] = sorted(image for _, images in took_part for image in images)
    return found


def noise(accuracy: float) -> float:
    """Return three standard deviations of the difference of two networks' accuracies on the held-out samples."""
    part = min(max(accuracy, 1 / HELD_OUT), 1 - 1 / HELD_OUT)
    return 3 * math.sqrt(2 * part * (1 - part) / HELD_OUT)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Runs of `epochs` epochs on `ranks` ranks, under the MPI of `environment`."""

    hpcdl: CommandLine | OnNodes
    data: Path
    folder: Path
    ranks: int
    epochs: int
    environment: Mapping[str, str]
    servers: int = 0
    strategy: str = "ring"
    """Strategies other than an all-reduce or `ps` keep each worker's batch, and do not take the same samples again."""

    @property
    def keeps_samples(self) -> bool:
        """Whether a step takes the same samples for any number of workers."""
        return find_strategy(self.strategy).features.equals_single

    def _start(self, folder: Path, *more: object) -> Any:
        folder.mkdir(parents=True)
        workers = self.ranks - self.servers
        line = [*SHORT, "--model", f"{PLANTED}:build_lenet", "--ranks", self.ranks, "--strategy", self.strategy]
        line += ["--data", self.data, "--epochs", self.epochs, "--run-dir", folder / "run"]
        if self.keeps_samples:
            line += ["--batch-size", BATCH, "--keep-batch", BATCH]
        else:
            rule = find_strategy(self.strategy).features.optimizers[0]
            line += ["--batch-size", BATCH // workers, "--optimizer", rule]
        line += [*(["--servers", self.servers] if self.servers else []), *more]
        return self.hpcdl.start(line, env={**self.environment, "RECORD_DIR": str(folder)})

    def undisturbed(self) -> Path:
        """Return the folder of a run without strikes; an existing one is used."""
        folder = self.folder / "undisturbed"
        if not (folder / "run" / "model.keras").exists():
            finished = finish(self._start(folder), 900)
            assert finished.code == 0, finished.err
        return folder

    def struck(self, whole: Path, num_strikes: int, seed: int) -> Survival:
        """Run with `num_strikes` strikes, and compare with the run in `whole`."""
        folder, drawn, began_s = self.folder / f"seed-{seed}", random.Random(seed), time.monotonic()
        found = Survival(seed=seed, load=os.getloadavg()[0])
        process = self._start(
            folder, "--elastic", "--min-workers", 1, "--checkpoint-every", "0.3s", "--stall-timeout", f"{STALL_S}s"
        )
        striker = Striker(folder / "run", self.epochs * PER_EPOCH, num_strikes, drawn)
        striker.start()
        try:
            finished = finish(process, 900)
            if finished.code:
                found.problems.append(f"ended with {finished.code}: {finished.err[-3000:]}")
        except pytest.fail.Exception as error:
            found.problems.append(str(error))
        finally:
            striker.over.set()
            striker.join()
        found.strikes, found.seconds = striker.strikes, time.monotonic() - began_s
        found.recovered = [*recoveries(journal_of(folder / "run"), striker.strikes)]
        found.problems += [
            f"continued, but nothing had struck it: {one}" for one in found.recovered if not one.failures
        ]
        if not found.problems:
            found.problems += self._differences(folder, whole)
        return found

    def _differences(self, folder: Path, whole: Path) -> Iterator[str]:
        """Yield the differences from the undisturbed run."""
        if self.keeps_samples:
            yield from self._other_samples(folder, whole)
        ours, theirs = (record_of(one / "run")["history"] for one in (folder, whole))
        accuracy, undisturbed = (history[-1]["val_accuracy"] for history in (ours, theirs))
        if abs(accuracy - undisturbed) > noise(undisturbed):
            yield f"its accuracy is {accuracy:.3f}, the undisturbed run's {undisturbed:.3f}"
        if int(ours[-1]["epoch"]) != self.epochs:
            yield f"its last epoch is {ours[-1]['epoch']}"

    def _other_samples(self, folder: Path, whole: Path) -> Iterator[str]:
        """Yield the steps that took other samples, and the epochs that did not take each sample once."""
        taken, expected = samples_of(folder), samples_of(whole)
        if sorted(taken) != [*range(self.epochs * PER_EPOCH)]:
            yield f"its steps were {sorted(taken)}"
        for epoch in range(self.epochs):
            steps = range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
            seen = [image for step in steps for image in taken.get(step, [])]
            if not len(seen) == len(set(seen)) == PER_EPOCH * BATCH:
                yield f"in epoch {epoch} {len(seen)} samples were seen, {len(set(seen))} different ones"
        if others := [step for step in expected if taken.get(step) != expected[step]]:
            yield f"other samples than in the undisturbed run in steps {others}"
        ours, theirs = (record_of(one / "run")["history"] for one in (folder, whole))
        if [point["step"] for point in ours] != [point["step"] for point in theirs]:
            yield f"evaluated after steps {[point['step'] for point in ours]}"


def journal_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a journal, without an incomplete line."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def summary(found: Sequence[Survival]) -> str:
    """Return a text with runs, failures, and the seconds of each way of recovery."""
    survived = sum(not one.problems for one in found)
    failures = sum(len(one.strikes) for one in found)
    loads = [one.load for one in found]
    lines = [f"{len(found)} runs, {survived} survived, {failures} failures, load {min(loads):.0f} to {max(loads):.0f}"]
    all_of_them = [one for survival in found for one in survival.recovered]
    for way in sorted({one.way for one in all_of_them}):
        own = [one for one in all_of_them if one.way == way]
        made_good = sum(one.failures for one in own)
        lines.append(f"{way}: {len(own)} times, {made_good} failures, {_spread([one.seconds for one in own])}")
        lines += [f"    {part}: {_spread([one.parts[part] for one in own])}" for part in own[0].parts]
    return "\n".join(lines)


def _spread(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s"


def main() -> None:
    """Print each run as it ends, and a summary at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--mpi", type=Path)
    parser.add_argument("--folder", type=Path, help="of the runs; an undisturbed one in it is taken (else a new one)")
    for name, default in {"ranks": 2, "servers": 0, "runs": 8, "strikes": 12, "epochs": 69, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", help="ring, or with servers ps, where nothing is said")
    parser.add_argument("--nodes", choices=["srun", "ssh"])
    asked = parser.parse_args()
    # Each node has a /tmp of its own.
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="survival-", dir="/var/tmp"))).resolve()
    by_ssh = asked.nodes == "ssh"
    here = nullcontext(CommandLine(folder))
    with on_nodes(asked.ranks, by_ssh=by_ssh) if asked.nodes else here as hpcdl:
        trial = Trial(
            hpcdl=hpcdl, data=asked.data.resolve(), folder=folder, ranks=asked.ranks, epochs=asked.epochs,
            servers=asked.servers, strategy=asked.strategy or ("ps" if asked.servers else "ring"),
            environment={"MPI4PY_LIBMPI": str(asked.mpi)} if asked.mpi else {},
        )  # fmt: skip
        found = [*_trials(trial, asked.strikes, range(asked.seed, asked.seed + asked.runs))]
    if asked.folder is None and not any(one.problems for one in found):
        shutil.rmtree(folder)


def _trials(trial: Trial, num_strikes: int, seeds: Sequence[int]) -> Iterator[Survival]:
    """Print each run as it ends; the folder of a run with problems stays."""
    whole, found = trial.undisturbed(), list[Survival]()
    for seed in seeds:
        found.append(trial.struck(whole, num_strikes, seed))
        print(json.dumps(asdict(found[-1])), summary(found), sep="\n", flush=True)
        if not found[-1].problems:
            shutil.rmtree(trial.folder / f"seed-{seed}")
        yield found[-1]


if __name__ == "__main__":
    main()

"""The policy of a search: trials run side by side, those that fall behind end early, and nothing counts twice.

A trial is a fresh `hpcdl train` on its own ranks. Proposals and results are in a journal (study/proposals.py);
search.json, which the report reads, is rewritten from it whenever a trial ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import time
import tomllib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import Layer, load, settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.search import SearchStudy
from hpcdl.core.errors import ConfigError, CorruptError, StoppedEarly, UsageError
from hpcdl.core.records.run_record import RunRecord, write_record
from hpcdl.core.storage.files import read_toml, toml_text, write_json
from hpcdl.core.units import counted, listed
from hpcdl.data.format.dataset import open_dataset
from hpcdl.node.machines import read_topology
from hpcdl.report.runs.searches import FILE_NAME, OF_SAMPLES, SearchRecord, SearchTrial, read_search
from hpcdl.run.journal import FILE_NAME as METRICS
from hpcdl.run.rundir import drop_heavy_results
from hpcdl.strategies.refusals import unused_settings
from hpcdl.strategies.table import find_strategy
from hpcdl.study.jobs import Allocation
from hpcdl.study.proposals import FAILED, FINISHED, RUNNING, STOPPED, Proposal, Proposals
from hpcdl.study.runner import (
    LOGS,
    SETTINGS,
    Attempt,
    Runner,
    Slot,
    Task,
    finished_record,
    record_of,
    wall_seconds,
    why_failed,
)
from hpcdl.study.state import check_same_data, is_new

TRIALS, ASIDE = "trials", "aside"
POLL_S = 0.2
VOID = "killed before it began"
"""Note of a trial that was proposed but never begun: no count includes it."""
_SETTINGS = settings_by_key(TrainConfig)


@dataclass(kw_only=True)
class _Trial:
    """An active trial: how many bytes of its metrics file are read, and whether it is behind the others."""

    proposal: Proposal
    read: int = 0
    behind: bool = False


def make_slots(search: SearchStudy, allocation: Allocation) -> list[Slot]:
    """Return room for trials side by side: parts of this node's cores, or groups of whole nodes.

    Raises UsageError if --parallel asks for more than fits.
    """
    cores = read_topology().usable_cores
    plan, nodes = search.plan, list(allocation.nodes)
    each = -(-plan.ranks // max(len(cores), 1))
    if len(nodes) > 1 or each > 1:
        fits = len(nodes) // each
        # Without the variable a launcher gives every trial all nodes of the job.
        most = fits if allocation.nodes_variable else min(fits, 1)
        wanted = min(plan.parallel or most, most)
        if not fits:
            here = f"{counted(len(nodes), 'node')} of {counted(len(cores), 'core')}"
            raise UsageError(f"--ranks {plan.ranks}: a trial needs {each} nodes, and there is {here}; lower --ranks")
        if (plan.parallel or 1) > most:
            raise UsageError(f"--ranks {plan.ranks}: {most} trials of {each} nodes fit side by side; lower --parallel")
        return [Slot(nodes=tuple(nodes[index * each : (index + 1) * each])) for index in range(wanted)]
    wanted = plan.parallel or max(1, len(cores) // plan.ranks)
    if wanted * plan.ranks > max(len(cores), plan.ranks):
        raise UsageError(
            f"--parallel {wanted}: with --ranks {plan.ranks} each, {max(1, len(cores) // plan.ranks)} fit on the "
            f"{len(cores)} cores here; lower it"
        )
    share = len(cores) // wanted
    return [
        Slot(nodes=tuple(nodes), cpus=tuple(cpu for core in cores[index * share : (index + 1) * share]
                                            for cpu in core.cpus))
        for index in range(wanted)
    ]  # fmt: skip


def check_search(search: SearchStudy) -> None:
    """Raise ConfigError for settings that no trial can have: [train] with the ends and choices of each dimension."""
    base = {"ranks": search.plan.ranks, **search.train}
    base |= {
        dimension.key: (dimension.choices or (dimension.low,))[0]
        for dimension in search.space
        # Required settings: without a value of theirs no other setting can be checked.
        if dimension.key in ("model", "data")
    }
    problems: list[str] = []
    for dimension in search.space:
        for value in dimension.choices or (dimension.low, dimension.high):
            tried = int(value) if dimension.whole else value
            try:
                load(TrainConfig, [Layer(origin=search.origin, values={**base, dimension.key: tried})])
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def check_data(search: SearchStudy) -> None:
    """UsageError or CorruptError where data of the trials cannot be opened: each would fail, one after the other."""
    tried = [value for item in search.space if item.key == "data" for value in item.choices]
    for data in tried or [search.train.get("data")]:
        if data is not None:
            open_dataset(str(data))


def open_search(folder: Path, search: SearchStudy, *, resume: bool) -> SearchRecord:
    """Return the initial state of the search; write nothing. Raises UsageError if `folder` holds anything else."""
    plan = search.plan
    fresh = SearchRecord(
        name=search.name, origin=search.origin, sampler=plan.sampler, objectives=list(plan.objective),
        directions=search.directions, planned=plan.trials, mark=uuid.uuid4().hex,
    )  # fmt: skip
    if (folder / FILE_NAME).exists():
        if not resume:
            raise UsageError(f"{folder} holds a search; continue with --resume, or choose another --out DIR")
        before = read_search(folder / FILE_NAME)
        if (before.name, list(before.objectives)) != (search.name, list(plan.objective)):
            raise UsageError(f"{folder} holds a search of another name or objective; choose another --out DIR")
        _check_same_job(folder, search, before)
        return dataclasses.replace(before, planned=plan.trials, sampler=plan.sampler)
    if not is_new(folder):
        raise UsageError(f"{folder} exists and holds no search; choose another --out DIR")
    return fresh


def _check_same_job(folder: Path, search: SearchStudy, before: SearchRecord) -> None:
    """Raise UsageError if the trials of `before` had other settings: they would compete, and the best command be wrong.

    The space may change, since each trial records its own settings.
    """
    if not before.trials:
        return
    earlier = read_toml(folder / SETTINGS, CorruptError) if (folder / SETTINGS).exists() else {}
    records = [record for trial in before.trials if (record := record_of(folder / TRIALS / f"{trial.number:04d}"))]
    earlier |= {"ranks": records[0].ranks if records else search.plan.ranks}
    current = {**_as_written(search.train), "ranks": search.plan.ranks}
    differing = [key for key in {**earlier, **current} if earlier.get(key) != current.get(key)]
    if differing:
        differences = [f"{key} {earlier.get(key, 'unset')}, now {current.get(key, 'unset')}" for key in differing]
        raise UsageError(
            f"{folder} holds trials of other settings ({listed(differences)}); give them as they were, or choose "
            "another --out DIR"
        )
    check_same_data(folder, [record for record in records if record.status == "finished"])


def _as_written(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as a file with them reads."""
    return tomllib.loads(toml_text(dict(settings)))


class HyperparameterSearch:
    """One call of `hpcdl search` on the search in `folder`. `notify` is called whenever a trial ends.

    `stop_after_s` is the time left in the job's limit.
    """

    def __init__(
        self,
        folder: Path,
        search: SearchStudy,
        record: SearchRecord,
        allocation: Allocation,
        notify: Callable[[SearchRecord, str], None] = lambda record, line: None,
        stop_after_s: float | None = None,
    ) -> None:
        self.record = record
        self._folder, self._search, self._allocation, self._notify = folder, search, allocation, notify
        self._slots = make_slots(search, allocation)
        self._waiting: list[Proposal] = []
        self._began = time.monotonic()
        # A budget includes the time of earlier calls.
        self._before_s = record.seconds
        self._runner = Runner[_Trial](
            folder=folder, mark=record.mark, allocation=allocation, settings=search.train, aside=ASIDE, poll_s=POLL_S,
            run_timeout_s=search.plan.run_timeout, stop_after_s=stop_after_s,
        )  # fmt: skip

    def run(self) -> SearchRecord:
        """Run trials until all are done or the budget is spent. Raises StoppedEarly after a signal."""
        with self._runner.opened([TRIALS, LOGS]):
            self._proposals = Proposals(self._folder, self._search)
            self._waiting = self._take_stock()
            # Before the first trial: without this file a killed search could not be resumed.
            self._write()
            try:
                self._runner.carry_out(self)
            finally:
                self._write()
        if self._runner.stopping:
            done, planned = sum(trial.state != RUNNING for trial in self.record.trials), self._search.plan.trials
            raise StoppedEarly(f"stopped with {done} of {planned} trials done; continue with --resume")
        return self.record

    def startable(self) -> Iterator[Task[_Trial]]:
        """Yield a trial for each free slot: first those that start again, then new ones."""
        busy_slots = [attempt.slot for attempt in self._runner.active]
        for slot in [slot for slot in self._slots if slot not in busy_slots]:
            proposal = self._waiting.pop(0) if self._waiting else self._next()
            if proposal is None:
                return
            trial, run_dir = _Trial(proposal=proposal), self._run_dir(proposal.number)
            yield Task(planned=trial, run_dir=run_dir, slot=slot, words=self._words(proposal))

    def watch(self) -> Collection[Attempt[_Trial]]:
        """Record the progress of the trials. Return those that are behind the others, to be ended."""
        alive = [attempt for attempt in self._runner.active if attempt.process.poll() is None]
        return [attempt for attempt in alive if self._is_behind(attempt)]

    def close(self, attempt: Attempt[_Trial]) -> bool:
        """Record the result of a trial, or why it failed. Return False if it was asked to stop."""
        trial, run_dir = attempt.planned, attempt.run_dir
        record = finished_record(run_dir)
        if record is not None:
            self._note(trial.proposal, record, attempt.seconds)
        elif attempt.process.returncode == StoppedEarly.exit_code and not trial.behind:
            return False  # by the batch system
        else:
            self._fail(attempt)
        drop_heavy_results(run_dir)
        self._write()
        self._notify(self.record, self._trial_text(trial.proposal.number))
        return True

    def _take_stock(self) -> list[Proposal]:
        """Settle trials that an earlier call left running: record those that finished, return those to start again."""
        to_restart = []
        for proposal in self._proposals.all():
            if proposal.state != RUNNING:
                drop_heavy_results(self._run_dir(proposal.number))  # if it was killed before it did that
                continue
            if not proposal.settings:
                # Optuna records a trial before its settings: a kill between the two leaves one without.
                self._proposals.tell(proposal.number, FAILED, message=VOID)
                continue
            record = finished_record(self._run_dir(proposal.number))
            if record is not None:
                self._note(proposal, record, wall_seconds(record) or record.seconds_total or 0.0)
                drop_heavy_results(self._run_dir(proposal.number))
            else:
                to_restart.append(proposal)
        return to_restart

    def _next(self) -> Proposal | None:
        """Return the next trial; None if no trial or no time is left."""
        plan, items = self._search.plan, self._counted()
        most = plan.trials
        if plan.sampler == "grid":
            most = min(most, math.prod(len(dimension.grid) for dimension in self._search.space))
        if len(items) >= most or (plan.budget is not None and self._elapsed() >= plan.budget):
            return None
        return self._proposals.ask()

    def _counted(self) -> list[Proposal]:
        return [proposal for proposal in self._proposals.all() if proposal.notes.get("message") != VOID]

    def _words(self, proposal: Proposal) -> list[str]:
        """Return the command-line arguments for a trial's settings."""
        arguments = ["--ranks", str(self._search.plan.ranks)]
        for key, value in proposal.settings.items():
            # A journal holds plain values; parsed, they print as the flag takes them.
            arguments += ["--set", f"{key}={_SETTINGS[key].show(_SETTINGS[key].parse(value))}"]
        return arguments

    def _is_behind(self, attempt: Attempt[_Trial]) -> bool:
        trial = attempt.planned
        trial.behind = trial.behind or any(
            self._proposals.progress(trial.proposal.number, epoch, value) for epoch, value in self._new_points(attempt)
        )
        return trial.behind

    def _new_points(self, attempt: Attempt[_Trial]) -> Iterator[tuple[int, float]]:
        """Yield newly evaluated epochs of a trial with the first objective, if an epoch shows it."""
        trial, path = attempt.planned, attempt.run_dir / METRICS
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(trial.read)
            for line in file:
                # The run is still writing this line.
                if not line.endswith(b"\n"):
                    break
                trial.read += len(line)
                event = json.loads(line)
                value = _so_far(self._search.plan.objective[0], event) if event.get("kind") == "epoch" else None
                if value is not None:
                    # Optuna's steps are whole numbers, and halving counts from 1.
                    yield max(1, round(event["epoch"])), value

    def _fail(self, attempt: Attempt[_Trial]) -> None:
        """Record why a trial did not finish, also in its run's record if there is one."""
        trial = attempt.planned
        state = STOPPED if trial.behind else FAILED
        message = "behind the others" if trial.behind else why_failed(attempt)
        cost = self._cost(attempt.seconds, len(attempt.slot.nodes))
        self._proposals.tell(trial.proposal.number, state, message=message, **cost)
        if (record := record_of(attempt.run_dir)) is not None:
            status = "stopped" if trial.behind else "failed"
            write_record(attempt.run_dir, dataclasses.replace(record, status=status, message=message))

    def _note(self, proposal: Proposal, record: RunRecord, seconds: float) -> None:
        """Record the values of a finished run. A run without them has failed."""
        values = [_reached(name, record) for name in self._search.plan.objective]
        finite_values = [value for value in values if value is not None and math.isfinite(value)]
        state = FINISHED if len(finite_values) == len(values) else FAILED
        missing = [name for name, value in zip(self._search.plan.objective, values, strict=True) if value is None]
        message = "" if state == FINISHED else f"its run has no {', '.join(missing) or 'finite value'}"
        notes = {"message": message, **self._cost(seconds, record.nodes)}
        if not record.evaluated_on and OF_SAMPLES & {*self._search.plan.objective}:
            self.record = dataclasses.replace(self.record, on_training=True)
        versions = (f"{name} {record.software[name]}" for name in ("hpcdl", "tensorflow") if name in record.software)
        place = ", ".join(filter(None, (record.processor, *versions)))
        self.record = dataclasses.replace(self.record, places=sorted({*self.record.places, place}))
        self._proposals.tell(proposal.number, state, finite_values, **notes)

    def _cost(self, seconds: float, nodes: int) -> dict[str, Any]:
        return {"seconds": seconds, "node_hours": seconds * nodes / 3600, "ended_after_s": self._elapsed()}

    def _elapsed(self) -> float:
        return self._before_s + time.monotonic() - self._began

    def _trial_text(self, number: int) -> str:
        trial = self.record.trial(number)
        settings = " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                            for key, value in trial.settings.items())  # fmt: skip
        values = ", ".join(f"{name} {value:.4g}" for name, value in
                           zip(self.record.objectives, trial.values, strict=False))  # fmt: skip
        return f"trial {number} {trial.state}: {values or trial.message}  {settings}"

    def _write(self) -> None:
        """Rewrite search.json from the journal."""
        front = self._proposals.front()
        items = self._counted()
        commands = [
            command_of(self._search, proposal) for number in front for proposal in items if proposal.number == number
        ]
        record = dataclasses.replace(
            self.record,
            seconds=self._elapsed(),
            trials=[
                SearchTrial(number=proposal.number, state=proposal.state, settings=proposal.settings,
                            values=proposal.values,
                            **{key: proposal.notes[key] for key in _NOTES if key in proposal.notes})
                for proposal in items
            ],
            front=front,
            commands=commands,
            importance=self._proposals.importance(),
        )  # fmt: skip
        write_json(self._folder / FILE_NAME, dataclasses.asdict(record))
        self.record = read_search(self._folder / FILE_NAME)

    def _run_dir(self, number: int) -> Path:
        return self._folder / TRIALS / f"{number:04d}"


_NOTES = ("message", "seconds", "node_hours", "ended_after_s")


def command_of(search: SearchStudy, proposal: Proposal) -> str:
    """Return the `hpcdl train` command of a trial, as a user would type it."""
    values = {**search.train, "ranks": search.plan.ranks, **proposal.settings}
    # A trial may have drawn what it does not use; as a flag `hpcdl train` would refuse it.
    unused = unused_settings(find_strategy(values.get("strategy", _SETTINGS["strategy"].default)), values)
    arguments: list[str] = []
    for key, raw in values.items():
        if key in unused:
            continue
        setting = _SETTINGS[key]
        value = setting.parse(raw)
        arguments += (
            [f"--{'' if value else 'no-'}{key}"] if setting.kind == "bool" else [f"--{key}", setting.show(value)]
        )
    return shlex.join(["hpcdl", "train", *arguments])


def first_of(search: SearchStudy) -> Proposal:
    """Return a trial with the first value of each setting that applies, as an example."""
    settings: dict[str, Any] = {}
    waiting = list(search.space)
    # A condition may name a setting that the file has further below.
    while ready := [item for item in waiting if item.when.keys() <= {*search.train, *settings}]:
        waiting = [item for item in waiting if item not in ready]
        for item in ready:
            if item.applies({**search.train, **settings}):
                first = item.choices[0] if item.choices else item.low
                settings[item.key] = int(first) if item.whole else first
    return Proposal(number=0, settings=settings, state="planned", notes={})


def _so_far(objective: str, event: dict[str, Any]) -> float | None:
    """Return an objective's value at an epoch, or None: times are known only at the end."""
    names = {"accuracy": ("val_accuracy", "accuracy"), "loss": ("val_loss", "loss")}.get(objective, ())
    return next((float(event[name]) for name in names if event.get(name) is not None), None)


def _reached(objective: str, record: RunRecord) -> float | None:
    """Return an objective's value of a finished run; None if it has none."""
    seconds = record.seconds_to_target
    values: dict[str, float | None] = {
        "accuracy": record.accuracy,
        "loss": record.loss,
        "seconds-to-target": seconds,
        "node-hours-to-target": None if seconds is None else seconds * record.nodes / 3600,
        "images-per-second": record.images_per_second,
        "seconds": record.seconds_total,
    }
    return values[objective]

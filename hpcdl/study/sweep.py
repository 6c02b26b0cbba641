"""The policy of a sweep: start runs when there is room, repeat failed ones, and keep their measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.study import Study
from hpcdl.core.errors import NOT_FINITE, HpcdlError, StoppedEarly, UsageError
from hpcdl.core.records.run_record import RunRecord, read_record, write_record
from hpcdl.core.storage.disk import make_folder, move
from hpcdl.core.storage.files import read_json, write_json
from hpcdl.report.runs.sources import PROFILES
from hpcdl.run.rundir import drop_heavy_results
from hpcdl.study.choice import TRIES, choose
from hpcdl.study.jobs import Allocation, check_room
from hpcdl.study.plan import PlannedRun, StudyPoint, StudyRuns, is_try
from hpcdl.study.points import profile_of_point, settings_of_point
from hpcdl.study.runner import LOGS, Attempt, Runner, Slot, Task, finished_record, record_of, wall_seconds, why_failed
from hpcdl.study.state import RECORD_LOST, RUNS, StudyState, run_folder, write_state

FAILED = "failed"
CHOSEN = "chosen.json"
"""For each point number its chosen values and the accuracies behind them (config/study.py, TriedSettings)."""
POLL_S = 0.1
WARNED_EARLY_S = 90.0
"""Slurm may warn ranks up to a minute earlier than requested."""
_SETTINGS = settings_by_key(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class News:
    """What a sweep reports while it runs: the state, and a line if something ended."""

    state: StudyState
    running: Sequence[str]
    line: str = ""


class Sweep:
    """One call of `hpcdl sweep` on the study in `folder`. `notify` is called about ten times a second.

    `stop_after_s` is the time left in the job's limit: after it active runs are ended, and StoppedEarly is raised.
    """

    def __init__(
        self,
        folder: Path,
        study: Study,
        plan: StudyRuns,
        state: StudyState,
        allocation: Allocation,
        notify: Callable[[News], None] = lambda news: None,
        stop_after_s: float | None = None,
    ) -> None:
        check_room(plan, allocation)
        self.state = state
        self._folder, self._study, self._plan, self._notify = folder, study, plan, notify
        self._allocation = allocation
        self._waiting: list[PlannedRun] = []
        self._runner = Runner[PlannedRun](
            folder=folder, mark=state.mark, allocation=allocation, settings=study.train, aside=FAILED, poll_s=POLL_S,
            run_timeout_s=study.plan.run_timeout, stop_after_s=stop_after_s,
        )  # fmt: skip

    def run(self) -> StudyState:
        """Run the unfinished points and return the final state. Raises StoppedEarly after a signal."""
        with self._runner.opened([RUNS, LOGS, FAILED, *([TRIES] if self._study.choice else [])]):
            self._take_stock()
            self._waiting = [run for run in self._plan.runs if self.state.run(run.name).status == "waiting"]
            self._runner.carry_out(self)
        left = len(self._waiting) + len(self._runner.active)
        if self._runner.stopping and left:
            why = " in another job: the time of this one is over" if self._runner.ends_within(0.0) else ""
            raise StoppedEarly(f"stopped with {left} of {len(self._plan.runs)} runs to go; continue with --resume{why}")
        return self.state

    def startable(self) -> Iterator[Task[PlannedRun]]:
        """Yield the waiting runs, in their order, that fit together onto free nodes."""
        ready = [run for run in self._waiting if self._is_ready(run)]
        busy_nodes = {node for attempt in self._runner.active for node in attempt.slot.nodes}
        for run, nodes in _fitting(ready, [node for node in self._allocation.nodes if node not in busy_nodes]):
            self._waiting.remove(run)
            # Written before the process starts: a kill leaves no run that the file does not know.
            self._set(run, status="running")
            yield Task(planned=run, run_dir=self._run_dir(run), slot=Slot(nodes=nodes), words=self._words(run))

    def watch(self) -> Collection[Attempt[PlannedRun]]:
        """Report the progress of the sweep. No run is ended early."""
        self._show()
        return ()

    def close(self, attempt: Attempt[PlannedRun]) -> bool:
        """Record what a run has measured, or why it failed. Return False if it was asked to stop."""
        code = attempt.process.returncode
        if code == 0 and finished_record(attempt.run_dir) is not None:
            self._keep(attempt.planned, attempt.seconds)
            self._show(f"{attempt.planned.name} finished")
        elif code == StoppedEarly.exit_code and self._runner.ends_within(WARNED_EARLY_S):
            return False  # the batch system has warned the run itself, which is not the run's fault
        else:
            self._fail(attempt)
        return True

    def _take_stock(self) -> None:
        """Settle what an earlier call left: runs whose end it did not see, and failed ones, which are retried."""
        begun = [self._run_dir(run) for run in self._plan.runs if self.state.run(run.name).status == "running"]
        wait_until_still(begun, self._allocation.settle_s)
        for run in self._plan.runs:
            status = self.state.run(run.name).status
            if self.state.run(run.name).message == RECORD_LOST:
                self._show(f"{run.name} is run again: {RECORD_LOST}")
                self.state = self.state.changed(run.name, message="")
            record = finished_record(self._run_dir(run)) if status != "finished" else None
            if status in ("running", "waiting") and record is not None:
                self._keep(run, wall_seconds(record))
            elif status == "failed":
                if self._run_dir(run).exists():
                    move(self._run_dir(run), self._runner.set_aside(self._run_dir(run)))
                self.state = self.state.changed(run.name, status="waiting", attempts=0)
            elif status == "running":
                self.state = self.state.changed(run.name, status="waiting")
        write_state(self._folder, self.state)

    def _words(self, run: PlannedRun) -> list[str]:
        """Return the command-line arguments for a run's settings: a flag each, --set for those that vary."""
        chosen = {} if run.point.tried_for or self._study.choice is None else self._chosen(run.point)
        values = {**settings_of_point(run.point), "seed": self._seed(run), **chosen}
        varied = {key for key, _ in run.point.settings if key != "seed"} | chosen.keys()
        arguments: list[str] = []
        for key, value in values.items():
            arguments += ["--set", f"{key}={_SETTINGS[key].show(value)}"] if key in varied else [f"--{key}", str(value)]
        profile = profile_of_point(run.point, self._folder / PROFILES)
        return arguments if profile is None else [*arguments, "--profile", str(profile)]

    def _seed(self, run: PlannedRun) -> int:
        """Return the run's seed, different for each repeat and for tries: a run that chooses does not measure."""
        # With one seed repeats would learn alike, and count as one measurement.
        first = settings_of_point(run.point).get("seed", self._study.train.get("seed", 0))
        return int(first) + run.repeat - 1 + (self._study.plan.repeats if run.point.tried_for else 0)

    def _is_ready(self, run: PlannedRun) -> bool:
        """Return whether all tries of `run` have ended, at least one of them successfully."""
        states = [self.state.run(attempt.name).status for attempt in self._tries_of(run.point.number)]
        return not states or ("finished" in states and not {"waiting", "running"} & {*states})

    def _tries_of(self, number: int) -> list[PlannedRun]:
        return [run for run in self._plan.runs if run.point.tried_for == number]

    def _chosen(self, point: StudyPoint) -> dict[str, Any]:
        """Return the best values of the point's tries, by key. Report the choice and write it down."""
        assert self._study.choice is not None
        tries = [run for run in self._tries_of(point.number) if self.state.run(run.name).status == "finished"]
        chosen = choose([(read_record(self._run_dir(run)), run.point) for run in tries], self._study.choice)
        path = self._folder / CHOSEN
        written = read_json(path) if path.exists() else {}
        # Each repeat of a point asks again; the choice is written down and shown once.
        if str(point.number) not in written:
            write_json(path, {**written, str(point.number): chosen.as_json()})
            self._show(f"{point.label}: {chosen.sentence}")
        return dict(chosen.values)

    def _fail(self, attempt: Attempt[PlannedRun]) -> None:
        """Record why a run failed. It waits for another attempt if one is left and could end better."""
        run, run_dir = attempt.planned, attempt.run_dir
        attempts = self.state.run(run.name).attempts + 1
        record, allowed = record_of(run_dir), attempts <= self._study.plan.retries
        # Refused settings would be refused again, as numbers of this seed would again not be finite.
        alike = attempt.process.returncode == UsageError.exit_code or (record and record.failure == NOT_FINITE)
        again = allowed and not alike
        kept = self._runner.set_aside(run_dir) if again else run_dir
        why = why_failed(attempt).replace(str(run_dir), str(kept))
        stamp(run_dir, run, self._study, why)
        # Written before the move: after a kill between them, the runner sets the waiting run's folder aside itself.
        self._set(run, status="waiting" if again else "failed", attempts=attempts, message=why)
        if again:
            move(run_dir, kept)
            self._waiting.append(run)
        outlook = (
            "it will be started again" if again else "it is not started again, its seed and settings would be the same"
        )
        self._show(f"{run.name} failed ({why})" + (f"; {outlook}" if allowed else ""))

    def _keep(self, run: PlannedRun, seconds: float | None) -> None:
        run_dir = self._run_dir(run)
        # `finished` is written last: after a kill before it, the next call repeats these steps.
        stamp(run_dir, run, self._study)
        if not self._study.plan.keep_models:
            drop_heavy_results(run_dir)
        self._set(run, status="finished", seconds=seconds)

    def _set(self, run: PlannedRun, **values: Any) -> None:
        self.state = self.state.changed(run.name, **values)
        write_state(self._folder, self.state)

    def _show(self, line: str = "") -> None:
        self._notify(
            News(state=self.state, running=[attempt.planned.name for attempt in self._runner.active], line=line)
        )

    def _run_dir(self, run: PlannedRun) -> Path:
        return run_folder(self._folder, run)


def raise_for(state: StudyState, folder: Path) -> None:
    """Raise HpcdlError with the first message if runs have failed for good. A try may fail if another one has not."""
    failed = [run for run in state.runs if run.status == "failed"]
    left = any(run.status == "waiting" for run in state.runs)
    if failed and (left or not all(is_try(run.name) for run in failed)):
        records = [record_of(folder / (TRIES if is_try(run.name) else RUNS) / run.name) for run in failed]
        alike = all(record is not None and record.failure == NOT_FINITE for record in records)
        advice = (
            "with this seed and these settings they would fail again: change the study, and choose another --out DIR"
            if alike
            else "put right what it names, then try them again with --resume"
        )
        raise HpcdlError(
            f"{len(failed)} of {len(state.runs)} runs failed; {failed[0].name}: {failed[0].message}; "
            f"see {folder / LOGS}; {advice}"
        )


def _fitting(waiting: Sequence[PlannedRun], free: Sequence[str]) -> Iterator[tuple[PlannedRun, Sequence[str]]]:
    """Yield the runs, in their order, that fit together onto free nodes."""
    left = list(free)
    for run in list(waiting):
        # Smaller runs pass one that does not fit; it starts when they have run out.
        if run.point.nodes <= len(left):
            yield run, left[: run.point.nodes]
            left = left[run.point.nodes :]


def wait_until_still(folders: Sequence[Path], still_s: float, longest_s: float = 60.0) -> None:
    """Return when nothing in `folders` has changed for `still_s`, or after `longest_s`.

    Ranks of a job that was just killed live for some moments on other nodes, and save as they leave.
    """
    began = last = time.monotonic()
    before = _stamps(folders)
    while folders and time.monotonic() - last < still_s and time.monotonic() - began < longest_s:
        time.sleep(min(still_s / 4, 1.0))
        stamps = _stamps(folders)
        if stamps != before:
            before, last = stamps, time.monotonic()


def _stamps(folders: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Return the stamps of all files, because after a clock was set back later changes may have older times."""
    stamps = {}
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            with contextlib.suppress(OSError):  # the file has just been renamed
                status = path.stat()
                stamps[path] = status.st_mtime_ns, status.st_size
    return stamps


def stamp(run_dir: Path, run: PlannedRun, study: Study, failure: str = "") -> None:
    """Add the study, and the failure if any, to the run's record. Create a record if the run has none."""
    point, record = run.point, record_of(run_dir)
    if record is None:
        make_folder(run_dir)
        record = RunRecord(
            strategy=point.strategy, model=point.model, data=point.data, ranks=point.ranks, workers=point.workers,
            servers=point.servers, nodes=point.nodes, ranks_per_node=point.ranks_per_node,
            batch_per_rank=point.batch_size, global_batch=point.batch_size * point.workers,
        )  # fmt: skip
    changes: dict[str, Any] = {"status": "failed", "message": failure} if failure else {}
    changes |= {"study": study.name, "mode": study.plan.mode, "labels": dict(study.labels)}
    write_record(run_dir, dataclasses.replace(record, repeat=run.repeat, **changes))

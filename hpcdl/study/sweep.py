"""Carries a study out: starts its runs where there is room, keeps what they measured, and can be killed at any time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.cluster.processes import end_marked
from hpcdl.config.load import settings_by_key
from hpcdl.config.schema import TrainConfig
from hpcdl.config.study import Study
from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError
from hpcdl.core.processes.signals import caught
from hpcdl.core.records.run_record import read_record
from hpcdl.core.storage.disk import free_name, make_folder, move
from hpcdl.core.storage.files import read_json, write_json, write_toml
from hpcdl.core.storage.lock import writing
from hpcdl.run.rundir import discard, drop_heavy_results
from hpcdl.study.allocation import Allocation, check_room
from hpcdl.study.attempt import (
    Attempt,
    begin,
    finished_record,
    stamp,
    stop,
    wait_until_still,
    why_failed,
)
from hpcdl.study.choice import TRIES, choose
from hpcdl.study.plan import PlannedRun, StudyPoint, StudyRuns, is_try
from hpcdl.study.points import profile_of_point, settings_of_point
from hpcdl.study.state import StudyState, write_state
from hpcdl.trace.recorder import collect_abandoned
from hpcdl.tuning.trials import MARK

RUNS, FAILED, LOGS, SETTINGS = "runs", "failed", "logs", "train.toml"
CHOSEN = "chosen.json"
"""By point's number: what it runs with, on which accuracies (config/study.py, TriedSettings)."""
POLL_S = 0.1
WARNED_EARLY_S = 90.0
"""Slurm may warn ranks up to a minute before the time that was asked for."""
_SETTINGS = settings_by_key(TrainConfig)


@dataclass(frozen=True, kw_only=True)
class News:
    """What a sweep tells while it runs: the state, and a line where something ended."""

    state: StudyState
    running: Sequence[str]
    line: str = ""


class Sweep:
    """One call of `hpcdl sweep` on the study in `folder`; `notify` is told about ten times a second.

    `stop_after_s` is what the job's time limit leaves: then runs under way are ended, and StoppedEarly says so.
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
        self._active: list[Attempt[PlannedRun]] = []
        self._stopping = False
        self._stop_at = math.inf if stop_after_s is None else time.monotonic() + stop_after_s

    def run(self) -> StudyState:
        """Run what is not finished; returns the state at the end. StoppedEarly after a signal."""
        try:
            make_folder(self._folder)
        except OSError as error:
            raise UsageError(f"cannot make {self._folder}: {error.strerror}; choose another --out DIR") from None
        with writing(self._folder), caught(self._stop_soon):
            self._take_stock()
            waiting = [run for run in self._plan.runs if self.state.run(run.name).status == "waiting"]
            try:
                self._loop(waiting)
            finally:
                stop(self._active)
                if self._active:
                    end_marked(MARK, self.state.mark)
        return self.state

    def _stop_soon(self, number: int) -> None:
        """What a signal does; a flag and no lock, because a handler may interrupt whoever holds the lock."""
        self._stopping = True

    def _loop(self, waiting: list[PlannedRun]) -> None:
        while (waiting or self._active) and not self._stopping:
            ready = [run for run in waiting if self._is_ready(run)]
            if waiting and not ready and not self._active:
                break  # all tries of what is left have failed; raise_for tells why
            for run, nodes in _fitting(ready, self._free()):
                waiting.remove(run)
                self._begin(run, nodes)
            for attempt in [item for item in self._active if self._over(item)]:
                self._active.remove(attempt)
                if not self._close(attempt):
                    waiting.append(attempt.run)
            self._show()
            time.sleep(POLL_S)
            self._stopping = self._stopping or time.monotonic() >= self._stop_at
        if self._stopping and (waiting or self._active):
            left = len(waiting) + len(self._active)
            raise StoppedEarly(f"stopped with {left} of {len(self._plan.runs)} runs to go; continue with --resume")

    def _take_stock(self) -> None:
        """Settle what an earlier call left: runs that it did not see end, and failed ones, which get another chance."""
        for name in (RUNS, LOGS, FAILED, *([TRIES] if self._study.choice else [])):
            make_folder(self._folder / name)
        write_toml(self._folder / SETTINGS, self._study.train)
        end_marked(MARK, self.state.mark)  # a killed sweep could not end its runs
        begun = [self._run_dir(run) for run in self._plan.runs if self.state.run(run.name).status == "running"]
        wait_until_still(begun, self._allocation.settle_s)
        for run in self._plan.runs:
            status = self.state.run(run.name).status
            record = finished_record(self._run_dir(run)) if status != "finished" else None
            if status in ("running", "waiting") and record is not None:
                self._keep(run, record.seconds_total)
            elif status == "failed":
                if self._run_dir(run).exists():
                    move(self._run_dir(run), self._aside(run))
                self.state = self.state.changed(run.name, status="waiting", attempts=0)
            elif status == "running":
                self.state = self.state.changed(run.name, status="waiting")
        write_state(self._folder, self.state)

    def _begin(self, run: PlannedRun, nodes: Sequence[str]) -> None:
        run_dir = self._run_dir(run)
        if run_dir.exists():
            collect_abandoned(run_dir)
            discard(run_dir, self._aside(run))  # a part of a run is not a measurement
        self._set(run, status="running")
        words = ["--config", str(self._folder / SETTINGS), "--run-dir", str(run_dir)]
        wanted = settings_of_point(run.point)
        first = wanted.get("seed", self._study.train.get("seed", 0))
        wanted["seed"] = int(first) + run.repeat - 1  # repeats that learn alike would be one run
        own = {key for key, _ in run.point.settings} - {"seed"}
        if run.point.tried_for:
            wanted["seed"] += self._study.plan.repeats  # of no repeat: who is chosen on a run is not measured by it
        elif self._study.choice is not None:
            chosen = self._chosen(run.point)
            wanted, own = {**wanted, **chosen}, own | set(chosen)
        for key, value in wanted.items():
            words += ["--set", f"{key}={_SETTINGS[key].show(value)}"] if key in own else [f"--{key}", str(value)]
        profile = profile_of_point(run.point, self._folder / "profiles")
        if profile is not None:
            words += ["--profile", str(profile)]
        environment = {**self._allocation.environment(nodes), MARK: self.state.mark}
        log = self._folder / LOGS / f"{run.name}.log"
        self._active.append(begin(run, [*self._allocation.command, *words], environment, nodes, log))

    def _is_ready(self, run: PlannedRun) -> bool:
        """Whether all that `run` chooses from has been tried, and one of it has ended well."""
        names = self._tries_of(run.point.number)
        states = [self.state.run(name).status for name in names]
        return not names or ("finished" in states and not {"waiting", "running"} & {*states})

    def _tries_of(self, number: int) -> dict[str, PlannedRun]:
        return {run.name: run for run in self._plan.runs if run.point.tried_for == number}

    def _chosen(self, point: StudyPoint) -> dict[str, Any]:
        """The values with which the point's tries were best, by key; what was chosen is told and written down."""
        assert self._study.choice is not None
        tries = [run for name, run in self._tries_of(point.number).items() if self.state.run(name).status == "finished"]
        found = choose([(read_record(self._run_dir(run)), run.point) for run in tries], self._study.choice)
        path = self._folder / CHOSEN
        known = read_json(path) if path.exists() else {}
        if str(point.number) not in known:
            write_json(path, {**known, str(point.number): found.as_json()})
            self._show(f"{point.label}: {found.sentence}")
        return dict(found.values)

    def _over(self, attempt: Attempt[PlannedRun]) -> bool:
        limit = self._study.plan.run_timeout
        if attempt.process.poll() is None and limit is not None and attempt.seconds > limit:
            attempt.timed_out = True
            stop([attempt])
        return attempt.process.poll() is not None

    def _close(self, attempt: Attempt[PlannedRun]) -> bool:
        """Note how a run ended; False where it is to be started again."""
        run, run_dir = attempt.run, self._run_dir(attempt.run)
        if attempt.process.returncode == 0 and finished_record(run_dir) is not None:
            self._keep(run, attempt.seconds)
            self._show(f"{run.name} finished")
            return True
        if attempt.process.returncode == StoppedEarly.exit_code and time.monotonic() > self._stop_at - WARNED_EARLY_S:
            self._stopping = True  # the batch system has warned the run itself: no fault of its own
            return False
        attempts = self.state.run(run.name).attempts + 1
        last = attempts > self._study.plan.retries
        kept = run_dir if last else self._aside(run)
        why = why_failed(attempt, run_dir).replace(str(run_dir), str(kept))
        stamp(run_dir, run, self._study, why)
        self._set(run, status="failed" if last else "waiting", attempts=attempts, message=why)
        if not last:
            move(run_dir, kept)
        self._show(f"{run.name} failed ({why})" + ("" if last else "; it will be started again"))
        return last

    def _keep(self, run: PlannedRun, seconds: float | None) -> None:
        run_dir = self._run_dir(run)
        stamp(run_dir, run, self._study)
        if not self._study.plan.keep_models:
            drop_heavy_results(run_dir)
        self._set(run, status="finished", seconds=seconds)

    def _aside(self, run: PlannedRun) -> Path:
        """Where a failed attempt is kept, out of the way of the next; the report still tells of it."""
        return free_name(self._folder / FAILED / run.name)

    def _set(self, run: PlannedRun, **values: Any) -> None:
        self.state = self.state.changed(run.name, **values)
        write_state(self._folder, self.state)

    def _show(self, line: str = "") -> None:
        self._notify(News(state=self.state, running=[item.run.name for item in self._active], line=line))

    def _free(self) -> list[str]:
        taken = {node for attempt in self._active for node in attempt.nodes}
        return [node for node in self._allocation.nodes if node not in taken]

    def _run_dir(self, run: PlannedRun) -> Path:
        return self._folder / (TRIES if run.point.tried_for else RUNS) / run.name


def raise_for(state: StudyState, folder: Path) -> None:
    """HpcdlError where runs have failed for good: the first one's last words. A try may, if another one has not."""
    failed = [run for run in state.runs if run.status == "failed"]
    left = any(run.status == "waiting" for run in state.runs)
    if failed and (left or not all(is_try(run.name) for run in failed)):
        raise HpcdlError(
            f"{len(failed)} of {len(state.runs)} runs failed; {failed[0].name}: {failed[0].message}; "
            f"see {folder / LOGS}, and try them again with --resume"
        )


def _fitting(waiting: Sequence[PlannedRun], free: Sequence[str]) -> Iterator[tuple[PlannedRun, Sequence[str]]]:
    """The runs, in their order, that fit onto free nodes together."""
    left = list(free)
    for run in list(waiting):
        if run.point.nodes <= len(left):
            yield run, left[: run.point.nodes]
            left = left[run.point.nodes :]

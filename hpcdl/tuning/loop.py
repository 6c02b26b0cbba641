"""Finds a node's best settings: search proposes, trials measure, the log remembers, a profile results."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from hpcdl.core.processes.signals import caught
from hpcdl.node.settings import Settings, chosen
from hpcdl.tuning.findings import Found, checked, summaries, unit_of, warnings_of
from hpcdl.tuning.log import TrialLog
from hpcdl.tuning.search import Choice, Search
from hpcdl.tuning.space import Candidate, Space
from hpcdl.tuning.trials import TrialOutcome

OVERRUN = 0.1
"""Share of the budget that the last trial may go beyond it."""


class Measure(Protocol):
    """What runs one sample; tuning.trials.Measurer is the real one."""

    def measure(self, candidate: Candidate, time_limit_s: float, prefix: Sequence[str] = ()) -> TrialOutcome:
        """One sample of `candidate`."""

    def stop(self) -> None:
        """End the samples under way."""


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """How long to search: `precision` is the relative half width of the winner's 95 % interval that is enough.

    `max_samples` counts those of an earlier run that is gone on with.
    """

    budget_s: float
    trial_timeout_s: float
    max_samples: int | None = None
    precision: float = 0.03
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """Where a search stands, for a display; `counted` is what the rate of the best counts."""

    seconds: float
    num_samples: int
    best: Choice | None
    settings: Settings | None
    counted: str


@dataclass(kw_only=True)
class Tuning:
    """One search on one kind of node; `prefixes` has a launcher prefix for each node that may run trials at once."""

    space: Space
    measure: Measure
    log: TrialLog
    limits: SearchLimits
    prefixes: Sequence[Sequence[str]] = ((),)
    notify: Callable[[SearchProgress], None] = lambda _: None
    _outcomes: dict[int, list[TrialOutcome]] = field(default_factory=dict)
    _durations: list[float] = field(default_factory=list)

    def run(self) -> Found:
        """Search until settled, the budget is used up, or SIGINT or SIGTERM asks to stop; the best so far is kept."""
        candidates = self.space.candidates
        points = [dataclasses.asdict(candidate.settings) for candidate in candidates]
        self._search = Search(
            points,
            seed=self.limits.seed,
            anchors=self.space.anchors,
            max_samples=self.limits.max_samples,
            precision=self.limits.precision,
        )
        self._remember()
        self._begin = time.monotonic()
        self._interrupted = threading.Event()
        with caught(self._interrupt):
            settled = self._loop()
        choice = self._search.best()
        return Found(
            choice=choice,
            settings=None if choice is None else candidates[choice.index].settings,
            trials=summaries(self._by_settings()),
            counted=unit_of(self._by_settings()),
            num_samples=self._search.num_samples,
            seconds=time.monotonic() - self._begin,
            settled=settled,
            stopped=self._interrupted.is_set(),
            warnings=warnings_of(self._by_settings()),
        )

    def _interrupt(self, number: int) -> None:
        self._interrupted.set()
        self.measure.stop()

    def _remember(self) -> None:
        """Tell the search what an earlier run logged."""
        indices = {repr(chosen(item.settings)): index for index, item in enumerate(self.space.candidates)}
        for entry in self.log.entries:
            index = indices.get(repr(dict(entry.settings)))
            if index is not None:
                self._note(index, entry.outcome)

    def _loop(self) -> bool:
        with ThreadPoolExecutor(len(self.prefixes)) as pool:
            while (limit_s := self._time_limit()) > 0 and not self._interrupted.is_set():
                asked = self._search.ask(len(self.prefixes))
                if not asked:
                    return self.limits.max_samples is None or self._search.num_samples < self.limits.max_samples
                candidates = [self.space.candidates[index] for index in asked]
                jobs = [
                    pool.submit(self.measure.measure, candidate, limit_s, prefix)
                    for candidate, prefix in zip(candidates, self.prefixes, strict=False)
                ]
                for index, job in zip(asked, jobs, strict=True):
                    self._take(index, job.result(), limit_s)
        return False

    def _time_limit(self) -> float:
        """Seconds that the next trial may take; 0 when what is left is less than half a usual trial."""
        left = self.limits.budget_s - (time.monotonic() - self._begin)
        usual = statistics.median(self._durations) if self._durations else 0.0
        if left <= 0 or left < 0.5 * usual:
            return 0.0
        return min(self.limits.trial_timeout_s, left + max(OVERRUN * self.limits.budget_s, 0.0))

    def _take(self, index: int, outcome: TrialOutcome, limit_s: float) -> None:
        if outcome.status == "stopped" or (outcome.status == "timeout" and limit_s < self.limits.trial_timeout_s):
            return  # ended by the budget, not by its own fault: it says nothing about the candidate
        outcome = checked(outcome, self._settings(index), self._by_settings())
        self._durations.append(outcome.seconds)
        self.log.add(chosen(self.space.candidates[index].settings), outcome)
        self._note(index, outcome)
        best = self._search.best()
        settings = None if best is None else self.space.candidates[best.index].settings
        self.notify(
            SearchProgress(
                seconds=time.monotonic() - self._begin,
                num_samples=self._search.num_samples,
                best=best,
                settings=settings,
                counted=unit_of(self._by_settings()),
            )
        )

    def _settings(self, index: int) -> Settings:
        return self.space.candidates[index].settings

    def _by_settings(self) -> list[tuple[Settings, Sequence[TrialOutcome]]]:
        """What was measured so far, candidate by candidate."""
        return [(self._settings(index), outcomes) for index, outcomes in self._outcomes.items()]

    def _note(self, index: int, outcome: TrialOutcome) -> None:
        self._outcomes.setdefault(index, []).append(outcome)
        self._search.tell(index, outcome.images_per_second if outcome.status == "ok" else None)

"""The loop of an asynchronous worker: workers do not wait for each other, and the run survives a worker that leaves.

Work is not divided in advance: workers train until the center has counted steps x workers updates, so a slow rank does
not delay the others. There is no collective between the first step and the last. Worker 0 alone evaluates the center,
over the whole held-out split, and saves it. If worker 0 is lost and the survivors continue in place (shrink.py), the
next worker takes over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpcdl.checkpoint.state import moving_statistics
from hpcdl.comm.observed import observe
from hpcdl.core.errors import CorruptError, HpcdlError, RankError, StoppedEarly, UsageError
from hpcdl.core.records.run_record import HistoryPoint, from_json
from hpcdl.rank.parts import Parts, Trainer
from hpcdl.rank.saver import move_to_center
from hpcdl.rank.synchronous import FLUSH_STEPS
from hpcdl.step.clock import Outcome
from hpcdl.step.host import Position
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.salvage import Center
from hpcdl.strategies.base.strategy import Worker
from hpcdl.strategies.elastic.flat import FlatWorker
from hpcdl.strategies.elastic.replica import Replica
from hpcdl.supervision.control import FOR_MORE, time_allowed
from hpcdl.supervision.watchdog import survivors

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

DONE, TARGET, SIGNAL, TIME, ERROR = "done", "target accuracy", "a signal", "the time limit", "an error"
LOST = "it was killed, or its node went down"
EVICTED = "it was too slow"
"""Why a worker left: training is complete, the worker was asked to stop, or it could not continue."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """How a worker left the training."""

    reason: str
    text: str = ""
    worker: int = 0
    steps: int = 0

    @property
    def stops_everybody(self) -> bool:
        """Whether the other workers should stop too."""
        return self.reason in (TARGET, TIME, FOR_MORE)


class AsynchronousTrainer(Trainer):
    """Trains with `parts` on one worker of a strategy whose workers do not step together.

    The center is saved with worker 0's moving statistics, while worker 0 works: a mean over all workers would need a
    collective.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.rejoin()
        parts.host.steps_done = self._steps_done
        self._evaluated = 0
        self._evaluated_count = -1
        self._means: list[float | None] = [None] * (1 + len(parts.host.objective.names))
        self._departure: Departure | None = None
        """How this worker left for good: it takes no more steps, even if other ranks are lost before all have left."""
        limit_s = time_allowed(parts.config.checkpoint.time_limit)
        self._leaves_at = float("inf") if limit_s is None else time.monotonic() + limit_s

    def rejoin(self) -> None:
        """Take the number of workers from the group of the parts."""
        run_plan = self.parts.run_plan
        self._replica = replica_of(self.parts.worker)
        self._num_workers = run_plan.num_workers
        self._per_epoch = run_plan.steps_per_epoch * self._num_workers
        self._replica.total = run_plan.num_steps * self._num_workers

    def _steps_done(self) -> int:
        return self._replica.count // self._num_workers

    def take_over(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take the place of the lost worker 0: read what it evaluated from the journal's `events`, its only trace.

        Reset the sums of training loss: this worker's sums cover more than one epoch.
        """
        parts = self.parts
        points = [from_json(HistoryPoint, event) for event in events if event["kind"] == "epoch"]
        fresh = [point for point in points if point not in parts.outcome.history]
        parts.outcome.history += fresh
        if fresh:
            self._evaluated_count = round(fresh[-1].epoch * self._per_epoch)
        parts.host.position.take_totals()

    def progress(self, center: Center | None) -> dict[str, Any]:
        """Return the center's update count: that of `center` if given, which may exceed the count this worker knows."""
        if center is not None:
            self._replica.count = center.count
        return {"count": self._replica.count, "evaluated_count": self._evaluated_count}

    def position_at(self, step: int, facts: Mapping[str, Any], local_state: Mapping[str, Array]) -> Position:
        """Resume at the center's update count, converted to samples."""
        global_batch = self.parts.run_plan.global_batch
        # An update covers one worker's batch: the global batch divided by the ranks of that time.
        samples = facts["count"] * facts["global_batch"] // facts["ranks"]
        position = Position(num_metrics=len(self.parts.host.objective.names))
        position.step = samples // global_batch
        position.seconds = facts["seconds"]
        self._replica.count = samples * self._num_workers // global_batch
        self._evaluated = int(facts["history"][-1]["epoch"]) if facts["history"] else 0
        self._evaluated_count = facts.get("evaluated_count", -1)
        return position

    def run(self) -> Outcome:
        """Train until the center has all its updates.

        Raises StoppedEarly, after a checkpoint, if every worker left before that on a signal or at the time limit.
        Raises HpcdlError if all of them failed.
        """
        parts = self.parts
        began = parts.start()
        departure = self._departure or self._work(parts.batches(), began)
        parts.seen.doing("leaving")
        if departure.reason != DONE:
            self._departure = departure
        if departure.reason == ERROR:
            parts.journal.write("message", text=f"warning: worker 0 leaves: {departure.text}")
        with parts.seen.patiently():  # the others may work for long, and that is no stall
            self._replica.leave(stop=departure.stops_everybody)
        move_to_center(parts.worker, parts.trainable)
        departures = self._gather(departure)
        self._take_statistics(departures)
        parts.outcome.clock.flush()
        if self._replica.count < self._replica.total and all(leaver.reason != TARGET for leaver in departures):
            self._end_early(departures)
        if parts.group.rank == 0 and self._replica.count != self._evaluated_count:
            self._end_epoch(began)
        parts.outcome.center_steps = self._replica.count // self._num_workers
        parts.saver.writer.wait()
        parts.outcome.warnings += _warnings(departures)
        parts.close(began)
        return parts.outcome

    def _gather(self, own_departure: Departure) -> list[Departure]:
        """Return how every worker left, including the lost ones."""
        parts = self.parts
        departure = replace(own_departure, worker=parts.group.rank, steps=parts.outcome.steps_done)
        parts.outcome.num_lost = self._replica.num_lost
        # Without the lost ranks, for which the gather below would wait.
        parts.host.group = survivors(observe(parts.group), self._replica.num_lost)
        departures = [Departure(**leaver) for leaver in parts.group.allgather_json(vars(departure))]
        lost = set(range(self._num_workers)) - {leaver.worker for leaver in departures}
        return [*departures, *(Departure(reason=LOST, worker=worker) for worker in sorted(lost))]

    def _take_statistics(self, departures: list[Departure]) -> None:
        """If worker 0 left before the others, replace its moving statistics by those of the worker with most steps.

        Worker 0's own are old, or contain the cause of its failure. Collective over the workers that are not lost.
        """
        present = departures[: self.parts.group.size]
        donors = [index for index, leaver in enumerate(present) if leaver.reason != ERROR]
        if donors and present[0].reason in (ERROR, SIGNAL):
            # Ties go to the lowest index, so that all agree. The index counts in the group of those present, not in the
            # world.
            best = max(donors, key=lambda index: present[index].steps)
            broadcast_variables(self.parts.group, [*moving_statistics(self.parts.model).values()], best)

    def _work(self, batches: Iterator[Any], began: float) -> Departure:
        """Take steps until there is a reason to leave; an error counts as one."""
        parts = self.parts
        saved = time.monotonic()
        try:
            while not self._replica.stopped:
                parts.host.run_one(batches, began)
                if parts.stop.asked:
                    return Departure(reason=SIGNAL)
                if parts.seen.evicted:
                    return Departure(reason=EVICTED)
                if parts.outcome.steps_done % FLUSH_STEPS == 0:
                    parts.outcome.clock.flush()
                if parts.group.rank != 0:  # the rest of the loop evaluates and saves, which one worker does for all
                    continue
                if time.monotonic() >= self._leaves_at:
                    return Departure(reason=TIME)
                if parts.room.wanted() and parts.saver.saved_to_grow(parts.room, count=self._replica.count):
                    return Departure(reason=FOR_MORE)
                if self._replica.count // self._per_epoch > self._evaluated and self._end_epoch(began):
                    return Departure(reason=TARGET)
                if time.monotonic() - saved >= parts.saver.interval.due_s:
                    saved = time.monotonic()
                    parts.saver.save(count=self._replica.count)
                parts.saver.copy(count=self._replica.count)
        except (RankError, CorruptError, UsageError):
            # A lost server, a broken network, damaged data, settings that no worker can train with: the run fails.
            raise
        except Exception as error:  # noqa: BLE001  an error of this worker must not stop the others
            lines = str(error).strip().splitlines() or [""]
            return Departure(reason=ERROR, text=lines[0] if isinstance(error, HpcdlError) else repr(error))
        return Departure(reason=DONE)

    def _end_epoch(self, began: float) -> bool:
        """Evaluate the center (worker 0 only). Return whether the target accuracy is reached."""
        count = self._replica.count
        seconds = time.monotonic() - began
        totals = self.parts.host.position.take_totals()
        if totals[0]:  # else no step since the last evaluation: keep its means
            self._means = (totals[1:] / totals[0]).tolist()
        reached = self.parts.end_epoch(count / self._per_epoch, count // self._num_workers, seconds, self._means)
        self._evaluated_count, self._evaluated = count, count // self._per_epoch
        return reached

    def _end_early(self, departures: list[Departure]) -> None:
        """Every worker left before the end: save a checkpoint and raise the reason."""
        parts = self.parts
        reasons = [leaver.reason for leaver in departures]
        reason = next((reason for reason in (TIME, SIGNAL, FOR_MORE) if reason in reasons), None)
        if reason is None:
            first = next(leaver for leaver in departures if leaver.reason == ERROR)
            raise HpcdlError(f"every worker has left; worker {first.worker}: {first.text}")
        if parts.group.rank == 0:
            # Until here the position counts this worker's own steps; the checkpoint is the center's.
            parts.host.position.step = parts.host.steps_done()
            parts.saver.save(count=self._replica.count)
            parts.leave_early(reason, parts.host.position.step)
        parts.worker.finish(early=True)
        raise StoppedEarly(f"stopped by {reason}", grows=reason == FOR_MORE)


def replica_of(worker: Worker) -> Replica:
    """Return the worker's replica: its weights and its count of the center's updates."""
    assert isinstance(worker, FlatWorker)
    return worker.replica


def _warnings(departures: list[Departure]) -> list[str]:
    return [
        f"worker {leaver.worker} left before the end ({': '.join(filter(None, [leaver.reason, leaver.text]))}); "
        "the others continued"
        for leaver in departures
        if leaver.reason in (SIGNAL, ERROR, LOST, EVICTED)
    ]

"""The loop of an asynchronous worker: nobody waits for anybody, and the run goes on without a worker that leaves.

Work is not divided in advance: workers go on until the center has counted steps x workers updates, so a slow rank does
not hold the others up. There is no collective between the first step and the last. Worker 0 alone evaluates the
center, over the whole held-out split, and saves it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from hpcdl.comm.observed import observe
from hpcdl.comm.threads.communicator import alone
from hpcdl.core.errors import CorruptError, HpcdlError, RankError, StoppedEarly
from hpcdl.core.protocols import Communicator
from hpcdl.core.records import HistoryPoint
from hpcdl.data.read.pipeline import evaluation_batches
from hpcdl.strategies.base import Worker
from hpcdl.strategies.elastic.flat import FlatWorker
from hpcdl.training.checkpoint.folders import CheckpointWriter
from hpcdl.training.checkpoint.position import Position
from hpcdl.training.launch.prepare import Prepared
from hpcdl.training.loop.center import center_in_place, move_to_center
from hpcdl.training.loop.clock import StepClock
from hpcdl.training.loop.evaluate import Evaluation
from hpcdl.training.loop.journal import Journal
from hpcdl.training.loop.outcome import Outcome
from hpcdl.training.loop.synchronous import FLUSH_STEPS, Trainer
from hpcdl.training.session.control import time_allowed
from hpcdl.training.session.watch import survivors

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

DONE, TARGET, SIGNAL, TIME, ERROR = "done", "target accuracy", "a signal", "the time limit", "an error"
LOST = "it was killed, or its node went down"
"""Why a worker left: the center takes no more updates; or it asked for that; or it could not go on."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """How a worker left the training."""

    reason: str
    text: str = ""
    worker: int = 0

    @property
    def stops_everybody(self) -> bool:
        """Whether the others should stop too."""
        return self.reason in (TARGET, TIME)


class AsynchronousTrainer(Trainer):
    """Trains one worker of a strategy whose workers do not step together."""

    def __init__(
        self,
        prepared: Prepared,
        model: keras.Model,
        worker: Worker,
        group: Communicator,
        journal: Journal,
        run_dir: Path,
    ) -> None:
        super().__init__(prepared, model, worker, group, journal, run_dir)
        assert isinstance(worker, FlatWorker)
        self._replica = worker.replica
        # Worker 0's moving statistics go with the center: a mean of all would need a collective.
        self._statistics_group = self._alone = alone()
        self._writer = CheckpointWriter(run_dir, self._alone, self._config.checkpoint.keep_checkpoints)
        self.outcome = Outcome(clock=StepClock(group, synchronous=False, warmup_steps=self._config.run.warmup_steps))
        self._per_epoch = prepared.steps_per_epoch * prepared.num_workers
        self._replica.total = prepared.num_steps * prepared.num_workers
        self._evaluated = 0
        self._evaluated_count = -1
        self._means: list[float | None] = []

    def position_at(self, step: int, facts: Mapping[str, Any], own: Mapping[str, Array]) -> Position:
        """The center's count, in samples, decides where everybody goes on."""
        samples = facts["count"] * facts["global_batch"] // facts["ranks"]
        position = Position(num_metrics=len(self._objective.names))
        position.step = samples // self._prepared.global_batch
        position.seconds = facts["seconds"]
        self._replica.count = samples * self._prepared.num_workers // self._prepared.global_batch
        self._evaluated = self._replica.count // self._per_epoch
        return position

    def run(self) -> Outcome:
        """Train until the center has all its updates.

        StoppedEarly where every worker left before that, on a signal or at the time limit, after a checkpoint;
        HpcdlError where all of them failed.
        """
        self._stop.install()
        self._start_worker()
        self._journal.write("start", steps=self._prepared.num_steps, done=self._position.step)
        began = time.monotonic() - self._position.seconds
        departure = self._work(self._batches(), began)
        self._seen.doing("leaving")
        if departure.reason == ERROR:
            self._journal.write("message", text=f"worker 0 leaves: {departure.text}")
        with self._seen.patiently():
            self._replica.leave(stop=departure.stops_everybody)
        move_to_center(self._worker, self.model.trainable_variables)
        departures = self._gather(departure)
        self.outcome.clock.flush()
        if self._replica.count < self._replica.total and all(one.reason != TARGET for one in departures):
            self._end_early(departures)
        if self._group.rank == 0 and self._replica.count != self._evaluated_count:
            self._end_epoch(began)
        self.outcome.center_steps = self._replica.count // self._prepared.num_workers
        self._writer.wait()
        self.outcome.warnings += _warnings(departures)
        self._worker.finish()
        self._close(began)
        return self.outcome

    def _gather(self, own: Departure) -> list[Departure]:
        """How every worker left, also those that can no longer say so."""
        departure = replace(own, worker=self._group.rank)
        self.outcome.num_lost = self._replica.num_lost
        self._group = survivors(observe(self._group), self._replica.num_lost)
        found = [Departure(**one) for one in self._group.allgather_json(vars(departure))]
        lost = set(range(self._prepared.num_workers)) - {one.worker for one in found}
        return [*found, *(Departure(reason=LOST, worker=worker) for worker in sorted(lost))]

    def _work(self, batches: Iterator[Any], began: float) -> Departure:
        """Steps until there is a reason to leave; an error is one."""
        saved = time.monotonic()
        limit_s = time_allowed(self._config.checkpoint.time_limit)
        deadline = saved + limit_s if limit_s is not None else float("inf")
        try:
            while not self._replica.stopped:
                self._one_step(batches, began)
                if self._stop.asked:
                    return Departure(reason=SIGNAL)
                if self.outcome.steps_done % FLUSH_STEPS == 0:
                    self.outcome.clock.flush()
                if self._group.rank != 0:
                    continue
                if time.monotonic() >= deadline:
                    return Departure(reason=TIME)
                if self._replica.count // self._per_epoch > self._evaluated and self._end_epoch(began):
                    return Departure(reason=TARGET)
                if time.monotonic() - saved >= self._config.checkpoint.checkpoint_every:
                    saved = time.monotonic()
                    self._save()
        except (RankError, CorruptError):  # a lost server, a torn network, damaged data: nothing to go on with
            raise
        except Exception as error:  # noqa: BLE001  whatever stops this worker must not stop the others
            lines = str(error).strip().splitlines() or [""]
            return Departure(reason=ERROR, text=lines[0] if isinstance(error, HpcdlError) else repr(error))
        return Departure(reason=DONE)

    def _steps_done(self) -> int:
        return self._replica.count // self._prepared.num_workers

    def _rate_at(self, step: int) -> float:
        """By the center's count, so that a slow worker does not lag behind in the schedule."""
        return self._schedule(self._replica.count // self._prepared.num_workers)

    def _end_epoch(self, began: float) -> bool:
        """Worker 0 evaluates the center; True where the target accuracy is reached."""
        self._evaluated = self._replica.count // self._per_epoch
        seconds = time.monotonic() - began
        totals = self._position.totals.copy()
        self._position.totals[:] = 0
        self._evaluated_count = count = self._replica.count
        with center_in_place(self._worker, self.model.trainable_variables):
            held_out = self._evaluate_split()
        if totals[0]:  # else no step since the last time: its means stand
            self._means = (totals[1:] / totals[0]).tolist()
        loss, *metrics = self._means or [None] * (len(totals) - 1)
        point = HistoryPoint(
            epoch=count / self._per_epoch,
            step=count // self._prepared.num_workers,
            seconds=seconds,
            loss=loss,
            accuracy=dict(zip(self._objective.names, metrics, strict=True)).get("accuracy"),
            val_loss=held_out.loss if held_out else None,
            val_accuracy=held_out.accuracy if held_out else None,
            val_metrics=held_out.metrics if held_out else {},
        )
        self.outcome.history.append(point)
        self._journal.write("epoch", **vars(point))
        return self._reaches_target(point)

    def _reaches_target(self, point: HistoryPoint) -> bool:
        # The last center is evaluated once more after the others have left; the target was reached before.
        return self.outcome.seconds_to_target is not None or super()._reaches_target(point)

    def _evaluate_split(self) -> Evaluation | None:
        split = self._prepared.dataset.evaluation_split
        if split is None:
            return None
        batches = evaluation_batches(self._prepared.dataset, split, batch_size=self._config.data.batch_size)
        return self._evaluate(self._noted(batches), self._alone)

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "count": self._replica.count}

    def _end_early(self, departures: list[Departure]) -> None:
        """Every worker has left before the end: save what there is, and say why."""
        reasons = [one.reason for one in departures]
        reason = next((reason for reason in (TIME, SIGNAL) if reason in reasons), None)
        if reason is None:
            first = next(one for one in departures if one.reason == ERROR)
            raise HpcdlError(f"every worker has left; worker {first.worker}: {first.text}")
        if self._group.rank == 0:
            self._position.step = self._replica.count // self._prepared.num_workers
            self._save()
        if self._group.rank == 0:
            self._leave_early(reason, self._position.step)
        self._worker.finish(early=True)
        raise StoppedEarly(f"stopped by {reason}")


def _warnings(departures: list[Departure]) -> list[str]:
    return [
        f"worker {one.worker} left before the end ({': '.join(filter(None, [one.reason, one.text]))}); "
        "the others went on"
        for one in departures
        if one.reason in (SIGNAL, ERROR, LOST)
    ]

"""What both loops are made of: steps, batches, evaluation, checkpoints; they differ in who waits for whom.

What the two loops have in common: workers that step together (synchronous.py) and those that do not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import keras

from hpcdl.checkpoint import state
from hpcdl.checkpoint.background import BackgroundWork
from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.checkpoint.memory import LocalCopies
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.observed import observe
from hpcdl.comm.threads import alone
from hpcdl.core.errors import Interrupted, StoppedEarly
from hpcdl.core.processes.streams import StopRequest
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.run_record import HistoryPoint, history_point
from hpcdl.data.read.pipeline import Batches, GraphBatches, evaluation_batches, training_batches
from hpcdl.faults.inject import Injection
from hpcdl.rank.saver import Saver, center_in_place
from hpcdl.run.journal import Journal
from hpcdl.run.plan import RunPlan
from hpcdl.step.clock import Outcome, StepClock
from hpcdl.step.evaluate import Evaluation, Evaluator
from hpcdl.step.host import HostStep, Position
from hpcdl.step.objective import Objective, objective_of
from hpcdl.step.optimizers import build_optimizer
from hpcdl.step.preprocess import augmentation_of
from hpcdl.strategies.base.salvage import Center
from hpcdl.strategies.base.strategy import Worker
from hpcdl.supervision.control import FOR_MORE, Room

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Trainer:
    """Trains with `parts` on one worker, from where a checkpoint or a smaller group stands to the end.

    What a loop does not need for going on with fewer workers does nothing here.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def run(self) -> Outcome:
        """Train to the end, or to a stop that everybody agrees on (StoppedEarly, after a checkpoint)."""
        raise NotImplementedError

    def position_at(self, step: int, facts: Mapping[str, Any], own: Mapping[str, Array]) -> Position:
        """Where this worker stands, of a state kept after `step` with `facts` and this rank's `own` arrays."""
        raise NotImplementedError

    def rejoin(self) -> None:
        """The parts have joined another group."""

    def progress(self, center: Center | None) -> dict[str, Any]:
        """What `position_at` takes beside the parts' facts, now that it is known what `center` has counted."""
        return {}

    def take_over(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Worker 0 is lost and this one takes its place; `events` are what it has written into the journal."""

    def owe_epoch_end(self, owes: bool) -> None:
        """Whether an epoch was over when the group broke, and nobody has evaluated."""


class Parts:
    """What one worker trains its model with.

    `host` takes the steps, `saver` saves what they have made. `group` holds the workers alone; `together` are those of
    them that evaluate and save together: all of `group`, or this one alone. `check_alive` raises where a rank is lost,
    for who evaluates alone. What is evaluated of a strategy whose workers differ is its center.
    """

    def __init__(
        self,
        run_plan: RunPlan,
        model: keras.Model,
        worker: Worker,
        group: Communicator,
        journal: Journal,
        run_dir: Path,
        injection: Injection,
        interval: CheckpointInterval,
        copies: LocalCopies,
        work: BackgroundWork,
    ) -> None:
        config = run_plan.config
        self.model, self.trainable = model, model.trainable_variables
        objective: Objective = objective_of(config.objective, run_plan.dataset.targets)
        scaled = config.model.precision == "mixed_float16"
        optimizer = build_optimizer(config.optimizer, self.trainable, loss_scaling=scaled)
        self.stop = StopRequest()
        self.room = Room(run_dir / FOLDER if config.checkpoint.elastic else None)
        self.seen = observe(group).monitor
        synchronous = run_plan.info.features.synchronous
        self.outcome = Outcome(clock=StepClock(group, synchronous=synchronous, warmup_steps=config.run.warmup_steps))
        self.injection = injection
        self.host = HostStep(model, optimizer, objective, self.outcome, self.seen, injection, run_dir)
        self.saver = Saver(self.host, self.seen, run_dir, injection, interval, work)
        self.join(run_plan, worker, group, journal, copies)
        self._evaluate = Evaluator(model, objective)
        self.check_alive: Callable[[], None] = lambda: None
        self._own: Mapping[str, Array] = {}

    def join(
        self,
        run_plan: RunPlan,
        worker: Worker,
        group: Communicator,
        journal: Journal,
        copies: LocalCopies,
    ) -> None:
        """Train with the workers of `group` from now on: all that talks to others, or goes by their number.

        Model, optimizer, position and what was measured stay as they are. Collective over the group.
        """
        self.run_plan, self.config = run_plan, run_plan.config
        self.together = group if run_plan.info.features.synchronous else alone()
        self.host.join(run_plan, worker, group, journal)
        self.saver.join(self.together, copies, self.config.checkpoint.keep_checkpoints)

    @property
    def worker(self) -> Worker:
        """The strategy's part of a step."""
        return self.host.worker

    @property
    def group(self) -> Communicator:
        """The workers."""
        return self.host.group

    @property
    def journal(self) -> Journal:
        """Where this rank writes what happens; nowhere, on all but the first."""
        return self.host.journal

    def abandon_group(self) -> None:
        """The group is revoked: nothing of what this rank has begun in it goes on afterwards."""
        self.worker.abandon()
        self.saver.abandon()

    def keep_own_statistics(self) -> None:
        """Whatever `start` takes from another rank, this one goes on with the moving statistics that it has."""
        self._own = self.saver.own_statistics()

    def restore_worker(self, own: Mapping[str, Array]) -> None:
        """Take back what a checkpoint holds of this rank alone: the strategy's part and the moving statistics."""
        self.worker.restore(own)
        self._own = own

    def start(self) -> float:
        """Begin alike on every rank, but for what a resumed rank had for itself; when that was (`time.monotonic`)."""
        self.stop.install()
        self.worker.start([*self.model.weights, *self.host.optimizer.variables])
        state.assign_own_statistics(self.model, self._own)
        self.host.choose_buckets(self._first_batch)
        counted = self.run_plan.dataset.counted
        self.journal.write("start", steps=self.run_plan.num_steps, done=self.host.position.step, counted=counted)
        return time.monotonic() - self.host.position.seconds

    def _first_batch(self) -> Any:
        """The batch that is next, which stays so."""
        with contextlib.closing(self.batches()) as batches:
            return next(batches)

    def resume(self, position: Position, history: list[HistoryPoint], best_loss: float | None = None) -> None:
        """Go on from `position`; the caller has put weights, optimizer and random state back."""
        self.host.resume(position, best_loss)
        self.saver.writer.newest = position.step
        self.outcome.history = history

    def batches(self) -> Batches | GraphBatches:
        """This worker's batches, from where it stands."""
        return training_batches(
            self.run_plan.dataset,
            batch_size=self.run_plan.worker_batch,
            global_batch=self.config.data.keep_batch,
            shift=self.host.position.shift,
            worker=self.group.rank,
            num_workers=self.group.size,
            seed=self.config.run.seed,
            start_step=self.host.position.step,
            augment=augmentation_of(self.config.data),
            deterministic=self.config.run.deterministic,
            in_graph=self.host.most_steps > 1,
        )

    def take_steps(self, count: int) -> None:
        """This worker's next `count` steps, one after the other."""
        began = time.monotonic() - self.host.position.seconds
        with contextlib.closing(self.batches()) as batches:
            for _ in range(count):
                self.host.run_one(batches, began)

    def evaluate_split(self) -> Evaluation | None:
        """Loss and metrics over the held-out split, where there is one; of the center, where there is one."""
        split = self.run_plan.dataset.evaluation_split
        if split is None:
            return None
        batches = evaluation_batches(
            self.run_plan.dataset,
            split,
            batch_size=self.config.data.batch_size,
            worker=self.together.rank,
            num_workers=self.together.size,
        )
        with center_in_place(self.worker, self.trainable):
            return self._evaluate(self._noted(batches), self.together)

    def _noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """`batches`, with a sign of life for each."""
        for batch in batches:
            self.seen.doing("evaluating")
            self.check_alive()
            yield batch

    def end_epoch(self, epoch: float, step: int, seconds: float, means: Sequence[float | None]) -> bool:
        """Evaluate; True where the target accuracy is reached. `means`: loss and metrics of the training steps."""
        held_out = self.evaluate_split()
        loss, *metrics = means
        point = history_point(
            epoch=epoch,
            step=step,
            seconds=seconds,
            loss=loss,
            accuracy=dict(zip(self.host.objective.names, metrics, strict=True)).get("accuracy"),
            val_loss=held_out.loss if held_out else None,
            val_accuracy=held_out.accuracy if held_out else None,
            val_metrics=held_out.metrics if held_out else {},
        )
        self.outcome.history.append(point)
        self.journal.write("epoch", **vars(point))
        if held_out and point.val_loss is None:
            self.host.warn(f"the loss on held-out samples is {held_out.loss}, from step {step} on or for a time")
        return self._reaches_target(point)

    def _reaches_target(self, point: HistoryPoint) -> bool:
        target = self.config.objective.target_accuracy
        if target is None or point.val_accuracy is None or point.val_accuracy < target:
            return False
        if self.outcome.seconds_to_target is not None:
            return True  # the last center is evaluated once more after the others have left
        self.outcome.seconds_to_target = point.seconds
        self.journal.write("message", text=f"target accuracy {target:g} reached after {point.seconds:.1f} s")
        return True

    def leave_early(self, reason: str, step: int) -> NoReturn:
        """Raise what a stop amounts to: StoppedEarly where there is a checkpoint to go on from, else Interrupted."""
        grows = reason == FOR_MORE
        self.saver.writer.wait()
        self.saver.tell_warnings()
        self.worker.finish(early=True)
        stopped = f"stopped by {reason} after step {step} of {self.run_plan.num_steps}"
        saved = self.saver.writer.newest
        if saved is None:
            raise Interrupted(f"{stopped}; no checkpoint could be written, so --resume begins again")
        if saved < step:
            raise StoppedEarly(
                f"{stopped}; its checkpoint could not be written: --resume continues after step {saved}", grows=grows
            )
        raise StoppedEarly(f"{stopped}; a checkpoint is saved: continue with --resume", grows=grows)

    def close(self, began: float) -> None:
        """The last thing: nothing is trained after it."""
        self.host.after_last()
        self.worker.finish()
        self.saver.tell_warnings()
        self.outcome.seconds = time.monotonic() - began
        self.outcome.warnings += self.saver.writer.warnings
        self.outcome.checkpoint_interval = self.saver.interval.choice
        if (buckets := self.host.buckets) is not None:
            self.outcome.bucket_bytes, self.outcome.bucket_seconds = buckets.bucket_bytes, buckets.seconds
        self.outcome.background = asdict(self.saver.work.spent)

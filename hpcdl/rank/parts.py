"""What both training loops share: steps, batches, evaluation, checkpoints.

The loops differ in who waits for whom: synchronous.py is for workers that step together, asynchronous.py for the rest.
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
    """Trains with `parts` on one worker, from the position of a checkpoint or of a smaller group to the end.

    The hooks for continuing with fewer workers do nothing here; a loop overrides those it needs.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def run(self) -> Outcome:
        """Train to the end, or to a stop that all ranks agree on (StoppedEarly, after a checkpoint)."""
        raise NotImplementedError

    def position_at(self, step: int, facts: Mapping[str, Any], local_state: Mapping[str, Array]) -> Position:
        """Return this worker's position in a state saved after `step` with `facts` and the arrays of `local_state`."""
        raise NotImplementedError

    def rejoin(self) -> None:
        """Adapt to the new group that the parts have joined."""

    def progress(self, center: Center | None) -> dict[str, Any]:
        """Return what `position_at` needs besides the parts' facts, given the update count of `center`."""
        return {}

    def take_over(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take the place of the lost worker 0; `events` are what it wrote into the journal."""

    def owe_epoch_end(self, owes: bool) -> None:
        """Note whether an epoch was complete but not evaluated when the group broke."""


class Parts:
    """What one worker trains its model with.

    `host` takes the steps, `saver` saves their results. `group` has the workers alone; `together` is the group that
    evaluates and saves together: all of `group`, or this worker alone. `check_alive` raises if a rank is lost, for a
    worker that evaluates alone. If the strategy's workers differ, its center is evaluated.
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
        """Join the workers of `group`: replace all that communicates with them or depends on their numbering.

        Model, optimizer, position and measurements stay as they are. Collective over the group.
        """
        self.run_plan, self.config = run_plan, run_plan.config
        # Asynchronous workers are at different steps: in a collective call each would wait for the others.
        self.together = group if run_plan.info.features.synchronous else alone()
        self.host.join(run_plan, worker, group, journal)
        self.saver.join(self.together, copies, self.config.checkpoint.keep_checkpoints)

    @property
    def worker(self) -> Worker:
        """The strategy's part of a step."""
        return self.host.worker

    @property
    def group(self) -> Communicator:
        """The group of the workers."""
        return self.host.group

    @property
    def journal(self) -> Journal:
        """The journal of this rank; on all ranks but the first it discards everything."""
        return self.host.journal

    def abandon_group(self) -> None:
        """Abandon the operations that this rank began in its group, which is revoked."""
        self.worker.abandon()
        self.saver.abandon()

    def keep_own_statistics(self) -> None:
        """Keep this worker's own moving statistics, whatever `start` takes from another rank."""
        self._own = self.saver.own_statistics()

    def restore_worker(self, local_state: Mapping[str, Array]) -> None:
        """Restore what a checkpoint holds of this rank alone: the strategy's part and the moving statistics."""
        self.worker.restore(local_state)
        self._own = local_state

    def start(self) -> float:
        """Begin with equal state on every rank, but a resumed rank's own. Return the start time (`time.monotonic`)."""
        self.stop.install()
        self.worker.start([*self.model.weights, *self.host.optimizer.variables])
        # After `start`, which has given every rank the statistics of one.
        state.assign_own_statistics(self.model, self._own)
        self.host.choose_buckets(self._first_batch)
        counted = self.run_plan.dataset.counted
        self.journal.write("start", steps=self.run_plan.num_steps, done=self.host.position.step, counted=counted)
        return time.monotonic() - self.host.position.seconds  # a resumed run counts the seconds before it too

    def _first_batch(self) -> Any:
        """Return the next batch without consuming it."""
        with contextlib.closing(self.batches()) as batches:
            return next(batches)

    def resume(self, position: Position, history: list[HistoryPoint], best_loss: float | None = None) -> None:
        """Continue from `position`; the caller has restored weights, optimizer and random state."""
        self.host.resume(position, best_loss)
        self.saver.writer.newest = position.step  # a stop before the next save must find something to resume from
        self.outcome.history = history

    def batches(self) -> Batches | GraphBatches:
        """Return this worker's batches, from its position on."""
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
        """Take this worker's next `count` steps one by one."""
        began = time.monotonic() - self.host.position.seconds
        with contextlib.closing(self.batches()) as batches:
            for _ in range(count):
                self.host.run_one(batches, began)

    def evaluate_split(self) -> Evaluation | None:
        """Return loss and metrics over the held-out split, if there is one; of the center if the strategy has one."""
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
        """Yield `batches`, with a heartbeat for each."""
        for batch in batches:
            self.seen.doing("evaluating")
            self.check_alive()
            yield batch

    def end_epoch(self, epoch: float, step: int, seconds: float, means: Sequence[float | None]) -> bool:
        """Evaluate. Return whether the target accuracy is reached. `means`: loss and metrics of the training steps."""
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
        """Raise StoppedEarly if there is a checkpoint to resume from, else Interrupted."""
        grows = reason == FOR_MORE
        self.saver.writer.wait()  # whether `newest` is this step is known only then
        self.saver.report_warnings()
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
        """Finish this worker; no training may follow."""
        self.host.after_last()
        self.worker.finish()
        self.saver.report_warnings()
        self.host.warn_if_diverged()
        self.outcome.seconds = time.monotonic() - began
        self.outcome.warnings += self.saver.writer.warnings
        self.outcome.checkpoint_interval = self.saver.interval.choice
        if (buckets := self.host.buckets) is not None:
            self.outcome.bucket_bytes, self.outcome.bucket_seconds = buckets.bucket_bytes, buckets.seconds
        self.outcome.background = asdict(self.saver.work.spent)

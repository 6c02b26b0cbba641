"""What the loop of a worker is made of: its parts, its batches and evaluation, its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import keras

from hpcdl.comm.observed import observe
from hpcdl.core.errors import Interrupted, StoppedEarly
from hpcdl.core.protocols import Communicator
from hpcdl.core.records import HistoryPoint
from hpcdl.core.signals import StopRequest
from hpcdl.data.read.pipeline import Augmentation, evaluation_batches, training_batches
from hpcdl.strategies.base import Worker
from hpcdl.training.checkpoint import state
from hpcdl.training.checkpoint.folders import CheckpointWriter, Snapshot
from hpcdl.training.checkpoint.position import Position
from hpcdl.training.launch.prepare import Prepared
from hpcdl.training.loop.center import center_in_place
from hpcdl.training.loop.clock import StepClock
from hpcdl.training.loop.evaluate import Evaluation, Evaluator
from hpcdl.training.loop.journal import Journal
from hpcdl.training.loop.outcome import Outcome
from hpcdl.training.loop.step import as_model_input, build_follow, build_step
from hpcdl.training.optimization.objective import Objective, objective_of
from hpcdl.training.optimization.optimizers import build_optimizer

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class TrainerParts:
    """Trains one model on one worker. `group` holds the workers alone; every method is collective over it."""

    def __init__(
        self,
        prepared: Prepared,
        model: keras.Model,
        worker: Worker,
        group: Communicator,
        journal: Journal,
        run_dir: Path,
    ) -> None:
        config = prepared.config
        self._prepared, self._config = prepared, config
        self.model, self._worker, self._group, self._journal = model, worker, group, journal
        self._objective: Objective = objective_of(config.objective)
        self.optimizer = build_optimizer(
            config.optimizer, model.trainable_variables, loss_scaling=config.model.precision == "mixed_float16"
        )
        self._schedule = prepared.schedule
        self._step = worker.build_step(model, self._objective, as_model_input) or build_step(
            model, self.optimizer, worker, self._objective, config.exchange.accumulate
        )
        self._follow = build_follow(model, self.optimizer, worker)
        self._evaluate = Evaluator(model, self._objective)
        self._writer = CheckpointWriter(run_dir, group, config.checkpoint.keep_checkpoints)
        self._position = Position(num_metrics=len(self._objective.names))
        self._statistics_group = group
        self._own: Mapping[str, Array] = {}
        self._memory: dict[str, Array] = {}
        self._told = 0
        self._statistics = [*state.moving_statistics(model)]
        self._trainable = model.trainable_variables
        self._read_weights = state.reader(model.weights)
        self._read_optimizer = state.reader(self.optimizer.variables)
        self._read_seeds = state.reader(state.seed_variables(model))
        self._stop = StopRequest()
        self._seen = observe(group).observation
        self.outcome = Outcome(clock=StepClock(group, synchronous=True, warmup_steps=config.run.warmup_steps))

    def position_at(self, step: int, facts: Mapping[str, Any], own: Mapping[str, Array]) -> Position:
        """Where a checkpoint stands in this run. With another global batch the epoch goes on at the next whole step."""
        position = Position(num_metrics=len(self._objective.names))
        if facts["ranks"] == self._group.size and facts["global_batch"] == self._prepared.global_batch:
            position.restore(own)
            return position
        epoch, step_in_epoch = divmod(step, facts["steps_per_epoch"])
        samples = step_in_epoch * facts["global_batch"]
        position.step = epoch * self._prepared.steps_per_epoch + -(-samples // self._prepared.global_batch)
        position.seconds = facts["seconds"]
        return position

    def restore_worker(self, own: Mapping[str, Array]) -> None:
        """Take back what a checkpoint holds of this rank alone: the strategy's part and the moving statistics."""
        self._worker.restore(own)
        self._own = own

    def _start_worker(self) -> None:
        """Begin alike on every rank, but for what a resumed rank had for itself."""
        self._worker.start([*self.model.weights, *self.optimizer.variables])
        state.assign_own_statistics(self.model, self._own)

    def resume(self, position: Position, history: list[HistoryPoint]) -> None:
        """Go on from `position`; the caller has put weights, optimizer and random state back."""
        self._position = position
        self._writer.newest = position.step
        self.outcome.history = history

    def _batches(self) -> Iterator[Any]:
        return iter(
            training_batches(
                self._prepared.dataset,
                batch_size=self._prepared.worker_batch,
                worker=self._group.rank,
                num_workers=self._group.size,
                seed=self._config.run.seed,
                start_step=self._position.step,
                augment=Augmentation(flip=self._config.data.flip, crop_padding=self._config.data.crop_padding),
                deterministic=self._config.run.deterministic,
            )
        )

    def _evaluate_split(self) -> Evaluation | None:
        split = self._prepared.dataset.evaluation_split
        if split is None:
            return None
        batches = evaluation_batches(
            self._prepared.dataset,
            split,
            batch_size=self._config.data.batch_size,
            worker=self._group.rank,
            num_workers=self._group.size,
        )
        return self._evaluate(self._noted(batches), self._group)

    def _noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """`batches`, with a sign of life for each."""
        for batch in batches:
            self._seen.doing("evaluating")
            yield batch

    def _save(self) -> None:
        """Begin a checkpoint. The model stays as it is, or a run would depend on when its checkpoints are made."""
        self._seen.doing("saving a checkpoint")
        self._writer.wait()  # what it wrote has given its memory back then
        self._tell_warnings()
        shared: dict[str, Array] = {}
        with center_in_place(self._worker, self._trainable):
            values = self._read_weights()
            if self._group.rank == 0:
                shared |= state.copy_of(values, "weights", self._memory)
        statistics = {index: values[index] for index in self._statistics}
        del values  # or TensorFlow copies what it wants to change
        means = state.mean_statistics(statistics, self._statistics_group)
        own = state.own_statistics(statistics, means)
        if self._group.rank == 0:
            shared |= {f"weights/{index}": mean for index, mean in means.items()}
            shared |= state.copy_of(self._read_optimizer(), "optimizer", self._memory)
        self._writer.start(
            Snapshot(
                step=self._position.step,
                shared=shared,
                own={**self._own_state(), **own},
                facts=self._facts(),
            )
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "steps_per_epoch": self._prepared.steps_per_epoch,
            "global_batch": self._prepared.global_batch,
            "seconds": self._position.seconds,
            "ranks": self._group.size,
            "history": [vars(point) for point in self.outcome.history],
        }

    def _own_state(self) -> dict[str, Array]:
        seeds = state.copy_of(self._read_seeds(), "seeds")
        return {**seeds, **self._position.arrays(), **self._worker.state()}

    def _stop_early(self, reason: str) -> None:
        self.outcome.clock.flush()
        self._save()
        self._leave_early(reason, self._position.step)

    def _leave_early(self, reason: str, step: int) -> NoReturn:
        """Raise what a stop amounts to: StoppedEarly where there is a checkpoint to go on from, else Interrupted."""
        self._writer.wait()
        self._tell_warnings()
        self._worker.finish(early=True)
        stopped = f"stopped by {reason} after step {step} of {self._prepared.num_steps}"
        saved = self._writer.newest
        if saved is None:
            raise Interrupted(f"{stopped}; no checkpoint could be written, so --resume begins again")
        if saved < step:
            raise StoppedEarly(f"{stopped}; its checkpoint could not be written: --resume goes on after step {saved}")
        raise StoppedEarly(f"{stopped}; a checkpoint is saved: go on with --resume")

    def _tell_warnings(self) -> None:
        """Say what went wrong with checkpoints, when it has happened; the record keeps it too."""
        for warning in self._writer.warnings[self._told :]:
            self._journal.write("message", text=f"warning: {warning}")
            self._told += 1

    def _sample_ids(self, step: int) -> list[int]:
        return self._prepared.sample_ids(step, self._group.rank)

    def _close(self, began: float) -> None:
        self._tell_warnings()
        self.outcome.seconds = time.monotonic() - began
        self.outcome.warnings += self._writer.warnings

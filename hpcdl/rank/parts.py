"""What both loops are made of: one step, batches, evaluation, checkpoints; they differ in who waits for whom.

Of a strategy whose workers differ, what is evaluated and kept is its center, put into the model for a while.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import keras
import numpy

from hpcdl.checkpoint import state
from hpcdl.checkpoint.background import BackgroundWork
from hpcdl.checkpoint.folders import CheckpointWriter, Snapshot
from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.checkpoint.memory import LocalCopies
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.observed import Traffic, observe, recorder_of
from hpcdl.comm.threads.communicator import alone
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import Interrupted, NotFiniteError, StoppedEarly
from hpcdl.core.protocols import Communicator
from hpcdl.core.records import HistoryPoint, history_point
from hpcdl.core.signals import StopRequest
from hpcdl.core.wall import WALL
from hpcdl.data.format.order import NO_SHIFT
from hpcdl.data.read.pipeline import Batches, GraphBatches, evaluation_batches, training_batches
from hpcdl.faults.inject import Injection
from hpcdl.run.going_back import way_back
from hpcdl.run.journal import Journal
from hpcdl.run.plan import RunPlan
from hpcdl.step.bucket_trials import BucketChoice, TrialStep, choose_buckets
from hpcdl.step.clock import Outcome, StepClock, StepTimes
from hpcdl.step.evaluate import Evaluation, Evaluator
from hpcdl.step.objective import Objective, objective_of
from hpcdl.step.optimizers import build_optimizer
from hpcdl.step.preprocess import augmentation_of
from hpcdl.step.several import CALL_S, build_several
from hpcdl.step.step import as_model_input, build_follow, build_step, inside_engine, num_samples
from hpcdl.strategies.allreduce.worker import AllReduceWorker
from hpcdl.strategies.base.strategy import Worker
from hpcdl.supervision import safety
from hpcdl.supervision.control import FOR_MORE, Room

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


@contextlib.contextmanager
def center_in_place(worker: Worker, variables: Sequence[Any]) -> Iterator[None]:
    """Inside, `variables` (the trainable ones) hold the center, afterwards the worker's own values again.

    Collective; does nothing where the strategy has no center.
    """
    center = worker.center()
    if center is None:
        yield
        return
    own = [numpy.array(variable) for variable in variables]
    assign_all(variables, center)
    try:
        yield
    finally:
        assign_all(variables, own)


def move_to_center(worker: Worker, variables: Sequence[Any]) -> None:
    """Leave the center in `variables` for good. Collective."""
    center = worker.center()
    if center is not None:
        assign_all(variables, center)


def assign_all(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Give each variable its value."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


EXPLODED = 10.0
"""A loss that is so many times the best one (or 1) above it tells that the run goes wrong."""


class Position:
    """Steps done, training seconds so far, and this rank's sums since the epoch began.

    `shift` tells of an epoch that began with another global batch. `totals` (float64) holds samples, summed loss and
    the summed metrics.
    """

    def __init__(self, num_metrics: int) -> None:
        self.step = 0
        self.shift = NO_SHIFT
        self.seconds = 0.0
        self.totals = numpy.zeros(2 + num_metrics)

    def add(self, loss: float, sums: Array, num_samples: int) -> None:
        """Count one step: `loss` is the mean over its `num_samples` samples."""
        self.step += 1
        self.totals += (num_samples, loss * num_samples, *sums)

    def take_totals(self) -> Array:
        """The sums so far; they begin anew."""
        totals, self.totals = self.totals, numpy.zeros_like(self.totals)
        return totals

    def arrays(self) -> dict[str, Array]:
        """The position as arrays, for a checkpoint."""
        return {"position": numpy.array([self.step, self.seconds]), "totals": self.totals.copy()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take the position that `arrays` wrote down."""
        step, self.seconds = arrays["position"].tolist()
        self.step = int(step)
        self.totals = arrays["totals"].copy()


class _Call(NamedTuple):
    """One call of the graph that may take several steps: `ends_at` is the step that it must not begin.

    `run_began` and `until_s`, after which it begins no step, are of `time.monotonic`.
    """

    run_began: float = 0.0
    ends_at: int = 0
    until_s: float = 0.0


class Parts:
    """What one worker trains its model with.

    `group` holds the workers alone. `together` are those of them that evaluate and save together: all of `group`, or
    this one alone. `steps_done` counts the steps of the run, which the learning rate follows. `check_alive` raises
    where a rank is lost, for who evaluates alone.
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
        self.model = model
        self._run_dir, self._injection, self.interval, self.work = run_dir, injection, interval, work
        self.objective: Objective = objective_of(config.objective, run_plan.dataset.targets)
        self.optimizer = build_optimizer(
            config.optimizer, model.trainable_variables, loss_scaling=config.model.precision == "mixed_float16"
        )
        self.trainable = model.trainable_variables
        self.stop = StopRequest()
        self.room = Room(run_dir / FOLDER if config.checkpoint.elastic else None)
        self.seen = observe(group).monitor
        self.seen.at_other_work = lambda: self.writer.is_writing or self.copies.is_writing
        synchronous = run_plan.info.features.synchronous
        self.outcome = Outcome(clock=StepClock(group, synchronous=synchronous, warmup_steps=config.run.warmup_steps))
        self.join(run_plan, worker, group, journal, copies)
        self._evaluate = Evaluator(model, self.objective)
        self.position = Position(num_metrics=len(self.objective.names))
        self.steps_done: Callable[[], int] = lambda: self.position.step
        self.check_alive: Callable[[], None] = lambda: None
        self._moved_by_forward: list[Any] = []
        self._read_moved_by_forward: state.Reader | None = None
        self._before_step: dict[str, Array] = {}
        self._is_in_step = False
        self.once_after_step: Callable[[], None] | None = None
        """Called when the next step is over, or the last one was."""
        self._own: Mapping[str, Array] = {}
        self._memory: dict[str, Array] = {}
        self._memory_of_copies: dict[str, Array] = {}
        self._began = 0.0
        self._best_loss, self._sound_step = math.inf, -1
        """The weights after so many steps still had a loss that was near the best."""
        self._statistics = [*state.moving_statistics(model)]
        self._read_weights = state.reader(model.weights)
        self._read_optimizer = state.reader(self.optimizer.variables)
        self._read_seeds = state.reader(state.seed_variables(model))

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
        self.worker, self.group, self.journal, self.copies = worker, group, journal, copies
        self.together = group if run_plan.info.features.synchronous else alone()
        self.buckets: BucketChoice | None = None
        self._step = worker.build_step(self.model, self.objective, as_model_input) or self._build_step(self.optimizer)
        self._follow = build_follow(self.model, self.optimizer, worker)
        self._most_steps = self._most_steps_of(self.config.run.steps_per_call)
        self._several = build_several(self._step, self.optimizer, self._got_batch, self._continues)
        self._call = _Call()
        keep, before = self.config.checkpoint.keep_checkpoints, self._injection.writing
        self.writer = CheckpointWriter(self._run_dir, self.together, keep, before=before, work=self.work)
        self._told = 0
        self.outcome.clock.join(group)

    def _build_step(self, optimizer: Any) -> Callable[..., Any]:
        slices = self.run_plan.slices_of(self.group.rank)
        return build_step(
            self.model, optimizer, self.worker, self.objective, len(slices), self._warn, slices=slices,
            weight=self.run_plan.weight_of(self.group.rank), recorder=recorder_of(self.group),
        )  # fmt: skip

    def abandon_group(self) -> None:
        """The group is revoked: nothing of what this rank has begun in it goes on afterwards."""
        self.worker.abandon()
        self.writer.abandon()
        self.copies.wait()
        self.tell_warnings()
        self.outcome.warnings += self.writer.warnings

    def may_repeat_steps(self) -> None:
        """From now on a step that does not come to its end can be taken again, after `leave_step`."""
        self._moved_by_forward = [*state.moving_statistics(self.model).values(), *state.seed_variables(self.model)]
        self._read_moved_by_forward = state.reader(self._moved_by_forward)

    def leave_step(self, *, undone: bool) -> None:
        """Of a step that did not come to its end: statistics and random states stand as before it, where `undone`."""
        if self._is_in_step and undone:
            state.assign(self._moved_by_forward, self._before_step, "before")
        self._is_in_step = False

    def keep_own_statistics(self) -> None:
        """Whatever `start` takes from another rank, this one goes on with the moving statistics that it has."""
        values = self._read_weights()
        self._own = state.own_statistics({index: values[index] for index in self._statistics}, {})

    def restore_worker(self, own: Mapping[str, Array]) -> None:
        """Take back what a checkpoint holds of this rank alone: the strategy's part and the moving statistics."""
        self.worker.restore(own)
        self._own = own

    def start(self) -> float:
        """Begin alike on every rank, but for what a resumed rank had for itself; when that was (`time.monotonic`)."""
        self.stop.install()
        self.worker.start([*self.model.weights, *self.optimizer.variables])
        state.assign_own_statistics(self.model, self._own)
        if self.config.exchange.bucket_size == AUTO and isinstance(self.worker, AllReduceWorker):
            self._choose_buckets(self.worker)
        counted = self.run_plan.dataset.counted
        self.journal.write("start", steps=self.run_plan.num_steps, done=self.position.step, counted=counted)
        return time.monotonic() - self.position.seconds

    def _choose_buckets(self, worker: AllReduceWorker) -> None:
        """Let the run find the size of its buckets, unless it goes on with one."""
        if self.buckets is None:
            self.seen.doing("trying sizes of buckets")
            config, slices = self.config, self.run_plan.slices_of(self.group.size - 1)
            settings = config.model, config.exchange, config.optimizer
            step = TrialStep(self.model, settings, self._build_step, self._first_batch, slices)
            self.buckets = choose_buckets(worker, self.group, step, deterministic=config.run.deterministic)
            self.journal.write("message", text=str(self.buckets))
        worker.bucket_bytes = self.buckets.bucket_bytes

    def _first_batch(self) -> Any:
        """The batch that is next, which stays so."""
        with contextlib.closing(self.batches()) as batches:
            return next(batches)

    def resume(self, position: Position, history: list[HistoryPoint], best_loss: float | None = None) -> None:
        """Go on from `position`; the caller has put weights, optimizer and random state back."""
        self.position = position
        self._best_loss = math.inf if best_loss is None else best_loss
        self._sound_step = position.step - 1  # what it goes on from shows with its first step
        self.writer.newest = position.step
        self.outcome.history = history

    def batches(self) -> Batches | GraphBatches:
        """This worker's batches, from where it stands."""
        return training_batches(
            self.run_plan.dataset,
            batch_size=self.run_plan.worker_batch,
            global_batch=self.config.data.keep_batch,
            shift=self.position.shift,
            worker=self.group.rank,
            num_workers=self.group.size,
            seed=self.config.run.seed,
            start_step=self.position.step,
            augment=augmentation_of(self.config.data),
            deterministic=self.config.run.deterministic,
            in_graph=self._most_steps > 1,
        )

    def _most_steps_of(self, asked: int | str) -> int:
        """How many steps a call may take; by itself several where nothing is exchanged between them."""
        if asked != AUTO:
            return int(asked)
        return sys.maxsize if self.run_plan.info.features.several_steps and self.group.size == 1 else 1

    def take_steps(self, batches: Iterator[Any], run_began: float, most: int) -> None:
        """`most` steps, or fewer: as many as one call of the graph takes."""
        most = min(1 if self.stop.asked else most, self._injection.free_steps(self.position.step))
        if not isinstance(batches, GraphBatches) or most == 0:
            self.one_step(batches, run_began)
            return
        first = self.position.step
        self._call = _Call(run_began, first + min(most, self._most_steps), time.monotonic() + CALL_S)
        traffic = self.seen.traffic()
        rate = self._announce()
        self.worker.before_step(first)
        with safety.naming_samples(lambda: self._sample_ids(self.position.step), self._way_back):
            self._several(batches.iterator, rate)
        self.outcome.traffic += self.seen.traffic() - traffic

    def _got_batch(self) -> float:
        """A step in the graph has its batch."""
        now = WALL.now_s()
        self.seen.doing("computing")
        return now

    def _continues(self, facts: Array, sums: Array) -> tuple[bool, float]:
        """A step in the graph is over; whether another one follows, and at which learning rate."""
        updated = WALL.now_s()
        loss, samples, *stamps = facts.tolist()
        self._step_over(loss, sums, int(samples), (*stamps, updated), self._call.run_began)
        if self.position.step >= self._call.ends_at or time.monotonic() >= self._call.until_s:
            return False, 0.0
        rate = self._announce()
        self.worker.before_step(self.position.step)
        return True, float(rate)

    def _announce(self) -> Array:
        """A step begins; its learning rate."""
        self.seen.doing("reading a batch", self.position.step)
        self.worker.learning_rate = rate = self.run_plan.schedule(self.steps_done())
        self._began = WALL.now_s()
        # TensorFlow keeps a tensor of every Python number that it has ever been given, about 0.8 KB each.
        return numpy.array(rate, numpy.float32)

    def one_step(self, batches: Iterator[Any], run_began: float) -> None:
        """Read a batch, compute, exchange, update; and note when each was over."""
        step = self.position.step
        self.optimizer.learning_rate = self._announce()
        with self.seen.gaps.waiting():
            images, labels = next(batches)
        images = self._injection.batch(step, images)
        got_batch = WALL.now_s()
        self.seen.doing("computing")
        traffic = self.seen.traffic()
        self.worker.before_step(step)
        if self._read_moved_by_forward is not None:
            self._before_step = state.copy_of(self._read_moved_by_forward(), "before", self._before_step)
            self._is_in_step = True
        if self.worker.follows:
            self._follow_step(self._began, got_batch, run_began, traffic)
            return
        with safety.naming_samples(lambda: self._sample_ids(step), self._way_back):
            with inside_engine(self.seen, mpi=self.run_plan.info.features.mpi, num_workers=self.group.size):
                loss, sums, had_gradients, exchanged = self._step(images, labels)
                loss = float(loss)
            self._is_in_step = False
            stamps = (got_batch, float(had_gradients), float(exchanged), WALL.now_s())
            self._step_over(loss, numpy.asarray(sums), num_samples(labels), stamps, run_began)
        self.outcome.traffic += self.seen.traffic() - traffic

    def _step_over(
        self, loss: float, sums: Array, samples: int, stamps: tuple[float, float, float, float], run_began: float
    ) -> None:
        """Count the step that began last. `stamps`: it had its batch, its gradients, had exchanged and updated."""
        got_batch, had_gradients, exchanged, updated = stamps
        had_gradients = WALL.settled(had_gradients, got_batch)
        safety.check_loss(loss, self.position.step, self.group.rank)
        if loss - self._best_loss <= EXPLODED * max(1.0, abs(self._best_loss)):
            self._sound_step = self.steps_done()
        self._best_loss = min(self._best_loss, loss)
        self.worker.after_step(self.position.step)
        self.position.add(loss, sums, samples)
        self.position.seconds = time.monotonic() - run_began
        images_per_second = round(self.run_plan.global_batch / max(WALL.now_s() - self._began, 1e-9), 2)
        seconds = round(self.position.seconds, 3)
        self.journal.step(self.steps_done(), loss=loss, images_per_second=images_per_second, seconds=seconds)
        self.outcome.clock.add(
            StepTimes(
                began=self._began,
                got_batch=got_batch,
                had_gradients=had_gradients,
                exchanged=WALL.settled(exchanged, had_gradients),
                updated=updated,
                ended=WALL.now_s(),
                waited_s=self.worker.waited_s,
            )
        )
        self.outcome.steps_done += 1
        if self.once_after_step is not None:
            self.told_of_step()

    def told_of_step(self) -> None:
        """Call what waits for the end of a step."""
        tell, self.once_after_step = self.once_after_step, None
        if tell is not None:
            tell()

    def _follow_step(self, began: float, got_batch: float, run_began: float, traffic: Traffic) -> None:
        """A step that the others finished while this worker was late: their mean without a gradient of its own."""
        exchanged = WALL.settled(float(self._follow()), got_batch)
        updated = WALL.now_s()
        self.worker.after_step(self.position.step)
        self.outcome.traffic += self.seen.traffic() - traffic
        self.position.step += 1
        self.position.seconds = time.monotonic() - run_began
        self.outcome.clock.add(
            StepTimes(
                began=began,
                got_batch=got_batch,
                had_gradients=got_batch,
                exchanged=exchanged,
                updated=updated,
                ended=WALL.now_s(),
                follows=True,
            )
        )
        self.outcome.steps_done += 1

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
            accuracy=dict(zip(self.objective.names, metrics, strict=True)).get("accuracy"),
            val_loss=held_out.loss if held_out else None,
            val_accuracy=held_out.accuracy if held_out else None,
            val_metrics=held_out.metrics if held_out else {},
        )
        self.outcome.history.append(point)
        self.journal.write("epoch", **vars(point))
        if held_out and point.val_loss is None:
            self._warn(f"the loss on held-out samples is {held_out.loss}, from step {step} on or for a time")
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

    def save(self, **facts: Any) -> None:
        """Begin a checkpoint, which keeps `facts` too.

        The model stays as it is, or a run would depend on when its checkpoints are made.
        """
        began = time.monotonic()
        self.seen.doing("saving a checkpoint")
        self.writer.wait()  # what it wrote has given its memory back then
        self.tell_warnings()
        statistics, shared = self._read_state(self._memory)
        self._check_kept(shared)
        means = state.mean_statistics(statistics, self.together)
        if shared:
            shared |= {f"weights/{index}": mean for index, mean in means.items()}
        snapshot = self._snapshot(shared, state.own_statistics(statistics, means), facts)
        self.writer.start(snapshot, self.interval.patience_s)
        if told := self.interval.saved(time.monotonic() - began):
            self.journal.write("message", text=told)

    def saved_to_grow(self, **facts: Any) -> bool:
        """Whether what has been done is kept for more workers; where there is no room for it these go on. Collective.

        As for `save`, which it begins with.
        """
        self.save(**facts)
        self.writer.wait()
        self.tell_warnings()
        if self.writer.newest == self.position.step:
            return True
        if self.group.rank == 0:
            self.room.refuse()
            self.journal.write("message", text="warning: the workers stay as few: no checkpoint could be written")
        return False

    def keep_copy(self, **facts: Any) -> None:
        """Begin a copy of the state in the node's memory where one is due, which keeps `facts` too.

        Nobody waits for another rank's statistics: each keeps its own, all of them.
        """
        if not self.copies.due(self.position.step):
            return
        self.seen.doing("copying the state")
        self.copies.wait()
        statistics, shared = self._read_state(self._memory_of_copies)
        self._check_kept(shared)
        snapshot = self._snapshot(shared, state.own_statistics(statistics, {}), facts)
        self.copies.start(snapshot, self.outcome.clock.last_s)

    def _read_state(self, memory: dict[str, Array]) -> tuple[dict[int, Array], dict[str, Array]]:
        """The moving statistics as they stand, and on rank 0 copies in `memory` of what all ranks have in common."""
        shared: dict[str, Array] = {}
        with center_in_place(self.worker, self.trainable):
            values = self._read_weights()
            if self.group.rank == 0:
                shared |= state.copy_of(values, "weights", memory)
        statistics = {index: values[index] for index in self._statistics}
        del values  # or TensorFlow copies what it wants to change
        if self.group.rank == 0:
            shared |= state.copy_of(self._read_optimizer(), "optimizer", memory)
        return statistics, shared

    def check_weights(self) -> None:
        """NotFiniteError where this worker's weights, which are about to be kept, hold NaN or infinity."""
        self._check_kept({f"weights/{index}": value for index, value in enumerate(self._read_weights())})

    def _check_kept(self, shared: Mapping[str, Array]) -> None:
        kinds = {"weights": self.model.weights, "optimizer": self.optimizer.variables}
        paths = {f"{kind}/{index}": one.path for kind, those in kinds.items() for index, one in enumerate(those)}
        try:
            safety.check_kept(
                [(paths[name], value) for name, value in shared.items()], self.steps_done(), self.group.rank
            )
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error}; lower --learning-rate, or add --warmup-epochs; {self._way_back()}"
            ) from error  # fmt: skip

    def _way_back(self) -> str:
        return way_back(self._run_dir, self.config, self._sound_step)

    def _snapshot(self, shared: dict[str, Array], statistics: dict[str, Array], facts: dict[str, Any]) -> Snapshot:
        return Snapshot(
            step=self.position.step,
            shared=shared,
            own={**self._own_state(), **statistics},
            facts={**self.facts(), **facts},
        )

    def facts(self) -> dict[str, Any]:
        """Where the run stands, as a checkpoint says it."""
        return {
            "steps_per_epoch": self.run_plan.steps_per_epoch,
            "global_batch": self.run_plan.global_batch,
            "shift": self.position.shift.of(self.position.step // self.run_plan.steps_per_epoch),
            "seconds": self.position.seconds,
            "ranks": self.group.size,
            "history": [vars(point) for point in self.outcome.history],
            "buckets": None if self.buckets is None else asdict(self.buckets),
            "best_loss": self._best_loss if math.isfinite(self._best_loss) else None,
        }

    def _own_state(self) -> dict[str, Array]:
        seeds = state.copy_of(self._read_seeds(), "seeds")
        return {**seeds, **self.position.arrays(), **self.worker.state()}

    def leave_early(self, reason: str, step: int) -> NoReturn:
        """Raise what a stop amounts to: StoppedEarly where there is a checkpoint to go on from, else Interrupted."""
        grows = reason == FOR_MORE
        self.writer.wait()
        self.tell_warnings()
        self.worker.finish(early=True)
        stopped = f"stopped by {reason} after step {step} of {self.run_plan.num_steps}"
        saved = self.writer.newest
        if saved is None:
            raise Interrupted(f"{stopped}; no checkpoint could be written, so --resume begins again")
        if saved < step:
            raise StoppedEarly(
                f"{stopped}; its checkpoint could not be written: --resume continues after step {saved}", grows=grows
            )
        raise StoppedEarly(f"{stopped}; a checkpoint is saved: continue with --resume", grows=grows)

    def _warn(self, text: str) -> None:
        """Say at once, and keep for the record, what is found while a step is traced; once, of however many traces."""
        if text not in self.outcome.warnings:
            self.outcome.warnings.append(text)
            self.journal.write("message", text=f"warning: {text}")

    def tell_warnings(self) -> None:
        """Say what went wrong with checkpoints, when it has happened; the record keeps it too."""
        for warning in self.writer.warnings[self._told :]:
            self.journal.write("message", text=f"warning: {warning}")
            self._told += 1

    def _sample_ids(self, step: int) -> list[int]:
        return self.run_plan.sample_ids(step, self.group.rank, self.position.shift)

    def close(self, began: float) -> None:
        """The last thing: nothing is trained after it."""
        self.told_of_step()
        self.worker.finish()
        self.tell_warnings()
        self.outcome.seconds = time.monotonic() - began
        self.outcome.warnings += self.writer.warnings
        self.outcome.checkpoint_interval = self.interval.choice
        if self.buckets is not None:
            self.outcome.bucket_bytes, self.outcome.bucket_seconds = self.buckets.bucket_bytes, self.buckets.seconds
        self.outcome.background = asdict(self.work.spent)

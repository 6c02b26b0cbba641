"""A step on the host, for all training loops: read a batch, set the rate, call the graph, count, record."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import keras
import numpy

from hpcdl.checkpoint import state
from hpcdl.comm.observed import RankMonitor, Traffic, recorder_of
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import NotFiniteError
from hpcdl.core.processes.wall import WALL
from hpcdl.core.protocols import Communicator
from hpcdl.data.format.order import NO_SHIFT
from hpcdl.data.read.pipeline import GraphBatches
from hpcdl.run.journal import Journal
from hpcdl.run.listing import way_back
from hpcdl.run.plan import RunPlan
from hpcdl.step.bucket_size import BucketChoice, TrialStep, choose_buckets
from hpcdl.step.clock import Outcome, StepTimes
from hpcdl.step.objective import Objective
from hpcdl.step.step import CALL_S, as_model_input, build_follow, build_several, build_step, inside_engine, num_samples
from hpcdl.strategies.allreduce.worker import AllReduceWorker
from hpcdl.strategies.base.strategy import Worker

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


MOST_NAMED = 16


def check_loss(loss: float, step: int, rank: int) -> None:
    """Raise NotFiniteError if the loss is not finite although its gradients were."""
    if not math.isfinite(loss):
        raise NotFiniteError(f"loss is {loss} at step {step} on rank {rank}")


@contextlib.contextmanager
def naming_samples(ids_of_batch: Callable[[], Sequence[int]], way_back: Callable[[], str]) -> Iterator[None]:
    """Inside, an error about non-finite numbers also names the samples of the batch, and how to continue."""
    try:
        yield
    except NotFiniteError as error:
        ids = ids_of_batch()
        shown = ", ".join(str(sample) for sample in ids[:MOST_NAMED])
        omission = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
        raise NotFiniteError(
            f"{error}; samples of the batch: {shown}{omission}; "
            f"lower --learning-rate, add --warmup-epochs, or look at these samples; {way_back()}"
        ) from error


EXPLODED = 10.0
"""Training diverges if the loss exceeds the best one by more than this factor times the best one (or 1)."""


class BatchFaults(Protocol):
    """The effects of fault injection on steps (faults/inject.py)."""

    def batch(self, step: int, images: Any) -> Any:
        """Return the images of this step's batch after injected faults."""

    def free_steps(self, step: int) -> int:
        """Return the number of steps from `step` on that no fault affects."""


class Position:
    """Steps done, training seconds so far, and this rank's sums since the epoch began.

    `shift` describes an epoch that began with another global batch. `totals` (float64) holds the number of samples, the
    summed loss and the summed metrics.
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
        """Return the sums so far, and reset them."""
        totals, self.totals = self.totals, numpy.zeros_like(self.totals)
        return totals

    def arrays(self) -> dict[str, Array]:
        """Return the position as arrays, for a checkpoint."""
        return {"position": numpy.array([self.step, self.seconds]), "totals": self.totals.copy()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the position from `arrays`."""
        step, self.seconds = arrays["position"].tolist()
        self.step = int(step)
        self.totals = arrays["totals"].copy()


class _Call(NamedTuple):
    """One call of the graph that may take several steps: it stops before step `ends_at`.

    It begins no step after `until_s`. `run_began` and `until_s` are times of `time.monotonic`.
    """

    run_began: float = 0.0
    ends_at: int = 0
    until_s: float = 0.0


class HostStep:
    """Takes the steps of one worker; `position` is its position in the run, `outcome` collects the results.

    `steps_done` counts the steps of the run, on which the learning rate depends. With asynchronous strategies they
    differ from the steps of this worker.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Any,
        objective: Objective,
        outcome: Outcome,
        monitor: RankMonitor,
        faults: BatchFaults,
        run_dir: Path,
    ) -> None:
        self.model, self.optimizer, self.objective, self.outcome = model, optimizer, objective, outcome
        self._seen, self._faults, self._run_dir = monitor, faults, run_dir
        self.position = Position(num_metrics=len(objective.names))
        self.steps_done: Callable[[], int] = lambda: self.position.step
        self.once_after: Callable[[], None] | None = None
        """Called once at the end of the next step, or after the last one."""
        self.best_loss, self.sound_step = math.inf, -1
        """The last number of steps after which the loss was still near the best."""
        self._first_loss: float | None = None
        self._moved_by_forward: list[Any] = []
        self._read_moved_by_forward: state.Reader | None = None
        self._before_step: dict[str, Array] = {}
        self._is_in_step = False
        self._began = 0.0

    def join(self, run_plan: RunPlan, worker: Worker, group: Communicator, journal: Journal) -> None:
        """Step with the workers of `group` from here on. Collective over the group."""
        self._run_plan, self.worker, self.group, self.journal = run_plan, worker, group, journal
        self.buckets: BucketChoice | None = None
        self._step = worker.build_step(self.model, self.objective, as_model_input) or self.build(self.optimizer)
        self._follow = build_follow(self.model, self.optimizer, worker)
        self.most_steps = self._most_steps_of(run_plan.config.run.steps_per_call)
        xla = run_plan.config.model.xla
        self._several = build_several(self._step, self.optimizer, self._got_batch, self._continues, xla=xla)
        self._call = _Call()
        self._counted: Traffic | None = None
        self.outcome.clock.join(group)

    def build(self, optimizer: Any) -> Callable[..., Any]:
        """Return the step compiled with `optimizer`; trials of bucket sizes use another one."""
        slices = self._run_plan.slices_of(self.group.rank)
        return build_step(
            self.model, optimizer, self.worker, self.objective, len(slices), self.warn, slices=slices,
            weight=self._run_plan.weight_of(self.group.rank), recorder=recorder_of(self.group),
            xla=self._run_plan.config.model.xla,
        )  # fmt: skip

    def choose_buckets(self, first_batch: Callable[[], Any]) -> None:
        """Choose the bucket size if it is `auto` and not known from a checkpoint. Collective."""
        config, worker = self._run_plan.config, self.worker
        if config.exchange.bucket_size != AUTO or not isinstance(worker, AllReduceWorker):
            return
        if self.buckets is None:
            self._seen.doing("trying sizes of buckets")
            slices = self._run_plan.slices_of(self.group.size - 1)  # an uneven batch gives the last worker most
            settings = config.model, config.exchange, config.optimizer
            step = TrialStep(self.model, settings, self.build, first_batch, slices)
            self.buckets = choose_buckets(worker, self.group, step, deterministic=config.run.deterministic)
            self.journal.write("message", text=str(self.buckets))
        worker.bucket_bytes = self.buckets.bucket_bytes

    def resume(self, position: Position, best_loss: float | None = None) -> None:
        """Continue from `position`."""
        self.position = position
        self.best_loss = math.inf if best_loss is None else best_loss
        self.sound_step = position.step - 1  # the first step shows whether the restored weights are sound

    def run(self, batches: Iterator[Any], run_began: float, most: int) -> None:
        """Take at most `most` steps: as many as one call of the graph takes. Set the rate before each."""
        most = min(most, self._faults.free_steps(self.position.step))
        if not isinstance(batches, GraphBatches) or most == 0:  # 0: a fault is due, which only `run_one` applies
            self.run_one(batches, run_began)
            return
        first = self.position.step
        self._call = _Call(run_began, first + min(most, self.most_steps), time.monotonic() + CALL_S)
        before = self._traffic_before()
        rate = self._announce()
        self.worker.before_step(first)
        with naming_samples(lambda: self._sample_ids(self.position.step), self.way_back):
            self._several(batches.iterator, rate)
        self._count_traffic(before)

    def run_one(self, batches: Iterator[Any], run_began: float) -> None:
        """Read a batch, compute, exchange, update, and record the time of each part."""
        step = self.position.step
        self.optimizer.learning_rate = self._announce()
        with self._seen.gaps.waiting():
            images, labels = next(batches)
        images = self._faults.batch(step, images)
        got_batch = WALL.now_s()
        self._seen.doing("computing")
        # `before_step` may begin an exchange, whose messages belong to this step.
        before = self._traffic_before()
        self.worker.before_step(step)
        if self._read_moved_by_forward is not None:
            self._before_step = state.copy_of(self._read_moved_by_forward(), "before", self._before_step)
            self._is_in_step = True
        if self.worker.follows:
            self._run_without_gradient(got_batch, run_began)
        else:
            with naming_samples(lambda: self._sample_ids(step), self.way_back):
                mpi = self._run_plan.info.features.mpi
                with inside_engine(self._seen, mpi=mpi, num_workers=self.group.size):
                    loss, sums, had_gradients, exchanged = self._step(images, labels)
                    loss = float(loss)  # on a GPU only reading a result waits for the step
                self._is_in_step = False
                stamps = (got_batch, float(had_gradients), float(exchanged), WALL.now_s())
                self._note(loss, numpy.asarray(sums), num_samples(labels), stamps, run_began)
        self._count_traffic(before)

    def _run_without_gradient(self, got_batch: float, run_began: float) -> None:
        """Take a step that the others finished without this late worker: apply their mean, without its gradient."""
        exchanged = WALL.settled(float(self._follow()), got_batch)
        updated = WALL.now_s()
        self.position.step += 1
        self.position.seconds = time.monotonic() - run_began
        self.worker.after_step(self.position.step - 1)
        self._add_times(got_batch, got_batch, exchanged, updated, follows=True)

    def _announce(self) -> Array:
        """Begin a step; return its learning rate."""
        self._seen.doing("reading a batch", self.position.step)
        self.worker.learning_rate = rate = self._run_plan.schedule(self.steps_done())
        self._began = WALL.now_s()
        # TensorFlow keeps a tensor of every Python number it receives, about 0.8 KB each.
        return numpy.array(rate, numpy.float32)

    def _got_batch(self) -> float:
        """A step in the graph has its batch: return the time."""
        now_s = WALL.now_s()
        self._seen.doing("computing")
        return now_s

    def _continues(self, facts: Array, sums: Array) -> tuple[bool, float]:
        """End a step in the graph; return whether another step follows, and its learning rate."""
        updated = WALL.now_s()
        loss, samples, *stamps = facts.tolist()
        self._note(loss, sums, int(samples), (*stamps, updated), self._call.run_began)
        if self.position.step >= self._call.ends_at or time.monotonic() >= self._call.until_s:
            return False, 0.0
        rate = self._announce()
        self.worker.before_step(self.position.step)
        return True, float(rate)

    def _note(
        self, loss: float, sums: Array, samples: int, stamps: tuple[float, float, float, float], run_began: float
    ) -> None:
        """Count the current step. `stamps`: when it had its batch, its gradients, had exchanged, and had updated."""
        got_batch, had_gradients, exchanged, updated = stamps
        had_gradients = WALL.settled(had_gradients, got_batch)
        check_loss(loss, self.position.step, self.group.rank)
        if self._first_loss is None:
            self._first_loss = loss
        if loss - self.best_loss <= EXPLODED * max(1.0, abs(self.best_loss)):
            self.sound_step = self.steps_done()
        self.best_loss = min(self.best_loss, loss)
        step = self.position.step
        self.position.add(loss, sums, samples)  # first: the weights have changed, whatever fails below
        self.position.seconds = time.monotonic() - run_began
        self.worker.after_step(step)
        if text := self.worker.news():
            self.journal.write("message", text=text)
        images_per_second = round(self._run_plan.global_batch / max(WALL.now_s() - self._began, 1e-9), 2)
        seconds = round(self.position.seconds, 3)
        self.journal.step(self.steps_done(), loss=loss, images_per_second=images_per_second, seconds=seconds)
        exchanged = WALL.settled(exchanged, had_gradients)
        self._add_times(got_batch, had_gradients, exchanged, updated, waited_s=self.worker.waited_s)
        if self.once_after is not None:
            self.after_last()

    def _add_times(
        self, got_batch: float, had_gradients: float, exchanged: float, updated: float,
        *, waited_s: float = 0.0, follows: bool = False,
    ) -> None:  # fmt: skip
        self.outcome.clock.add(
            StepTimes(
                began=self._began,
                got_batch=got_batch,
                had_gradients=had_gradients,
                exchanged=exchanged,
                updated=updated,
                ended=WALL.now_s(),
                waited_s=waited_s,
                follows=follows,
            )
        )
        self.outcome.steps_done += 1

    def _traffic_before(self) -> Traffic:
        """Return the traffic at the step's start; if messages overlap steps, that at the end of the last step."""
        traffic = self._seen.traffic()
        return self._counted or traffic if self.worker.exchanges_between_steps else traffic

    def _count_traffic(self, before: Traffic) -> None:
        self._counted = self._seen.traffic()
        self.outcome.traffic += self._counted - before

    def after_last(self) -> None:
        """Call `once_after`, if it is set."""
        call, self.once_after = self.once_after, None
        if call is not None:
            call()

    def may_repeat(self) -> None:
        """Save the state before each step from here on, so that an interrupted step can be repeated after `leave`."""
        self._moved_by_forward = [*state.moving_statistics(self.model).values(), *state.seed_variables(self.model)]
        self._read_moved_by_forward = state.reader(self._moved_by_forward)

    def count_broken(self) -> None:
        """Count a step whose exchange broke if it had already updated the weights. Its loss is lost."""
        if self._is_in_step and self.worker.moves_first:
            self._is_in_step = False
            self.position.step += 1
            self.outcome.steps_done += 1

    def leave(self, *, undone: bool) -> None:
        """End an interrupted step; if `undone`, restore the statistics and random states from before it."""
        if self._is_in_step and undone:
            state.assign(self._moved_by_forward, self._before_step, "before")
        self._is_in_step = False

    def facts(self) -> dict[str, Any]:
        """Return the run's position in the format of a checkpoint."""
        steps_per_epoch = self._run_plan.steps_per_epoch
        return {
            "steps_per_epoch": steps_per_epoch,
            "global_batch": self._run_plan.global_batch,
            "shift": self.position.shift.of(self.position.step // steps_per_epoch),
            "seconds": self.position.seconds,
            "ranks": self.group.size,
            "history": [vars(point) for point in self.outcome.history],
            "buckets": None if self.buckets is None else asdict(self.buckets),
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
        }

    def way_back(self) -> str:
        """Return the command that goes back to sound weights."""
        return way_back(self._run_dir, self._run_plan.config, self.sound_step)

    def warn_if_diverged(self) -> None:
        """Warn if the mean loss of the last epoch, which is finite, is far above that of the first step."""
        last = self.outcome.history[-1].loss if self.outcome.history else None
        first = self._first_loss
        if first is not None and last is not None and last - first > EXPLODED * max(1.0, abs(first)):
            self.outcome.warnings.append(
                f"the loss rose from {first:.4g} to {last:.4g}: the training has diverged; lower --learning-rate, or "
                "add --warmup-epochs"
            )

    def warn(self, text: str) -> None:
        """Log and record a warning found while a step is traced; only once, even if it is traced again."""
        if text not in self.outcome.warnings:
            self.outcome.warnings.append(text)
            self.journal.write("message", text=f"warning: {text}")

    def _most_steps_of(self, asked: int | str) -> int:
        """Return how many steps a call may take; with `auto` several if workers exchange nothing between them."""
        if asked != AUTO:
            return int(asked)
        return sys.maxsize if self._run_plan.info.features.several_steps and self.group.size == 1 else 1

    def _sample_ids(self, step: int) -> list[int]:
        return self._run_plan.sample_ids(step, self.group.rank, self.position.shift)

"""The loop of a synchronous worker: batches, steps, epochs, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy

from hpcdl.comm.observed import Traffic
from hpcdl.core.records import HistoryPoint
from hpcdl.training.checkpoint import state
from hpcdl.training.loop.center import center_in_place, move_to_center
from hpcdl.training.loop.clock import StepTimes
from hpcdl.training.loop.outcome import Outcome
from hpcdl.training.loop.parts import TrainerParts
from hpcdl.training.session import safety
from hpcdl.training.session.control import Control, time_allowed

FLUSH_STEPS = 200
"""Ranks compare their time stamps at least this often."""


class Trainer(TrainerParts):
    """Trains one model on one worker; every method is collective over the workers."""

    def run(self) -> Outcome:
        """Train to the end, or to a stop that everybody agrees on (StoppedEarly, after a checkpoint)."""
        self._stop.install()
        self._start_worker()
        self._journal.write("start", steps=self._prepared.num_steps, done=self._position.step)
        safety_every = self._config.safety.divergence_check_steps
        control = Control(
            self._group,
            self._stop,
            self._worker,
            save_every_s=self._config.checkpoint.checkpoint_every,
            time_limit_s=time_allowed(self._config.checkpoint.time_limit),
        )
        batches = self._batches()
        began = time.monotonic() - self._position.seconds
        while self._position.step < self._prepared.num_steps:
            self._one_step(batches, began)
            done = self._position.step
            if safety_every and done % safety_every == 0:
                with center_in_place(self._worker, self.model.trainable_variables):
                    safety.check_same_weights(self.model.trainable_variables, self._group, done)
            if self._ends_epoch(done) and self._end_epoch(began):
                break
            self._tell_warnings()
            if done % FLUSH_STEPS == 0:
                self.outcome.clock.flush()
            wishes = control.after_step()
            if wishes.stop and done < self._prepared.num_steps:
                self._stop_early(wishes.reason)
            if wishes.save:
                self._save()
        self.outcome.clock.flush()
        self._writer.wait()
        move_to_center(self._worker, self.model.trainable_variables)
        self._worker.finish()
        self._close(began)
        return self.outcome

    def _one_step(self, batches: Iterator[Any], run_began: float) -> None:
        step = self._position.step
        self._seen.doing("reading a batch", step)
        self._worker.learning_rate = rate = self._rate_at(step)
        # TensorFlow keeps a tensor of every Python number that it has ever been given, about 0.8 KB each.
        self.optimizer.learning_rate = numpy.array(rate, numpy.float32)
        began = time.time()
        images, labels = next(batches)
        got_batch = time.time()
        self._seen.doing("computing")
        traffic = self._seen.traffic()
        self._worker.before_step(step)
        if self._worker.follows:
            self._follow_step(began, got_batch, run_began, traffic)
            return
        with safety.naming_samples(lambda: self._sample_ids(step)):
            with self._inside_engine():
                loss, sums, had_gradients, exchanged = self._step(images, labels)
                loss = float(loss)
            updated = time.time()
            safety.check_loss(loss, step, self._group.rank)
        self._worker.after_step(step)
        self.outcome.traffic += self._seen.traffic() - traffic
        self._position.add(loss, numpy.asarray(sums), len(labels))
        self._position.seconds = time.monotonic() - run_began
        images_per_second = round(self._prepared.global_batch / max(time.time() - began, 1e-9), 2)
        seconds = round(self._position.seconds, 3)
        self._journal.step(self._steps_done(), loss=loss, images_per_second=images_per_second, seconds=seconds)
        self.outcome.clock.add(
            StepTimes(
                began=began,
                got_batch=got_batch,
                had_gradients=float(had_gradients),
                exchanged=float(exchanged),
                updated=updated,
                ended=time.time(),
                waited_s=self._worker.waited_s,
            )
        )
        self.outcome.steps_done += 1

    def _follow_step(self, began: float, got_batch: float, run_began: float, traffic: Traffic) -> None:
        """A step that the others finished while this worker was late: their mean without a gradient of its own."""
        exchanged = float(self._follow())
        updated = time.time()
        self._worker.after_step(self._position.step)
        self.outcome.traffic += self._seen.traffic() - traffic
        self._position.step += 1
        self._position.seconds = time.monotonic() - run_began
        self.outcome.clock.add(
            StepTimes(
                began=began,
                got_batch=got_batch,
                had_gradients=got_batch,
                exchanged=exchanged,
                updated=updated,
                ended=time.time(),
            )
        )
        self.outcome.steps_done += 1

    def _inside_engine(self) -> AbstractContextManager[None]:
        """TensorFlow's own engines exchange inside the step, where nobody sees them wait."""
        if self._prepared.info.features.mpi or self._group.size == 1:
            return nullcontext()
        return self._seen.waiting_for("a step of TensorFlow's engine", hidden=True)

    def _steps_done(self) -> int:
        return self._position.step

    def _rate_at(self, step: int) -> float:
        return self._schedule(step)

    def _ends_epoch(self, steps_done: int) -> bool:
        return steps_done % self._prepared.steps_per_epoch == 0 or steps_done == self._prepared.num_steps

    def _end_epoch(self, began: float) -> bool:
        """Sum up and evaluate; True where the target accuracy is reached."""
        self._seen.doing("evaluating")
        self.outcome.clock.flush()
        state.average_moving_statistics(self.model, self._statistics_group)
        seconds = time.monotonic() - began
        totals = self._position.totals.copy()
        if self._group.size > 1:
            self._group.allreduce(totals)
        self._position.totals[:] = 0
        with center_in_place(self._worker, self.model.trainable_variables):
            held_out = self._evaluate_split()
        step = self._position.step
        point = HistoryPoint(
            epoch=step / self._prepared.steps_per_epoch,
            step=step,
            seconds=seconds,
            loss=totals[1] / totals[0],
            accuracy=dict(zip(self._objective.names, totals[2:] / totals[0], strict=True)).get("accuracy"),
            val_loss=held_out.loss if held_out else None,
            val_accuracy=held_out.accuracy if held_out else None,
            val_metrics=held_out.metrics if held_out else {},
        )
        self.outcome.history.append(point)
        self._journal.write("epoch", **vars(point))
        return self._reaches_target(point)

    def _reaches_target(self, point: HistoryPoint) -> bool:
        target = self._config.objective.target_accuracy
        if target is None or point.val_accuracy is None or point.val_accuracy < target:
            return False
        self.outcome.seconds_to_target = point.seconds
        self._journal.write("message", text=f"target accuracy {target:g} reached after {point.seconds:.1f} s")
        return True

"""The loop of a synchronous worker: all workers reach steps, epochs and checkpoints together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcdl.checkpoint import state
from hpcdl.data.format.order import Shift, continues_at
from hpcdl.rank.parts import Parts, Trainer
from hpcdl.rank.saver import center_in_place, move_to_center
from hpcdl.step.clock import Outcome
from hpcdl.step.host import Position
from hpcdl.supervision.control import FOR_MORE, Control, check_same_weights, time_allowed

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

FLUSH_STEPS = 200
"""Ranks compare their time stamps at least once per this many steps."""
DAMAGE = "memory or network damage, or an exchange that is not deterministic; go back with --resume"
"""The likely cause if weights that only hpcdl changes differ between ranks."""


class SynchronousTrainer(Trainer):
    """Trains with `parts` on one worker; every method is collective over the workers."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._owes_epoch_end = False
        allowed_s = time_allowed(parts.config.checkpoint.time_limit)
        # Fixed here, not in `run`: survivors of a loss call `run` again, and their time must not begin again.
        self._leaves_at = None if allowed_s is None else time.monotonic() + allowed_s

    def position_at(self, step: int, facts: Mapping[str, Any], local_state: Mapping[str, Array]) -> Position:
        """Return a checkpoint's position in this run. With another global batch continue at the epoch's next sample."""
        run_plan, epoch = self.parts.run_plan, step // facts["steps_per_epoch"]
        position = Position(num_metrics=len(self.parts.host.objective.names))
        position.shift = Shift(epoch=epoch, samples=facts.get("shift", 0))
        if facts["ranks"] == self.parts.group.size and facts["global_batch"] == run_plan.global_batch:
            position.restore(local_state)
            return position
        position.seconds = facts["seconds"]
        position.step = step
        if facts["global_batch"] == run_plan.global_batch:
            return position
        samples = step % facts["steps_per_epoch"] * facts["global_batch"] + position.shift.samples
        if run_plan.dataset.nodes:  # each node has its own sequence: continue at the next whole step, common to all
            position.step = epoch * run_plan.steps_per_epoch + -(-samples // run_plan.global_batch)
            return position
        position.step, position.shift = continues_at(
            epoch,
            samples,
            num_samples=run_plan.dataset.train_split.num_samples,
            global_batch=run_plan.global_batch,
        )
        return position

    def owe_epoch_end(self, owes: bool) -> None:
        """Begin with the evaluation at the epoch's end if `owes`."""
        self._owes_epoch_end = owes

    def run(self) -> Outcome:
        """Train to the end, or to a stop that all ranks agree on (StoppedEarly, after a checkpoint)."""
        parts, run_plan, config = self.parts, self.parts.run_plan, self.parts.config
        began = parts.start()
        safety_every = config.safety.divergence_check_steps
        control = Control(
            parts.group,
            parts.stop,
            parts.worker,
            interval=parts.saver.interval,
            time_limit_s=None if self._leaves_at is None else self._leaves_at - time.monotonic(),
            room=parts.room,
        )
        batches = parts.batches()
        if self._owes_epoch_end:
            self._end_epoch(began)
        reached = parts.outcome.seconds_to_target is not None
        while not reached and parts.host.position.step < run_plan.num_steps:
            before = parts.host.position.step
            parts.host.run(batches, began, self._free_steps(control))
            step = parts.host.position.step
            if safety_every and step % safety_every == 0:
                with center_in_place(parts.worker, parts.trainable):
                    named = {variable.path: variable for variable in parts.trainable}
                    check_same_weights(named, parts.group, f"after step {step}", DAMAGE)
            ends_epoch = step % run_plan.steps_per_epoch == 0 or step == run_plan.num_steps
            if ends_epoch and self._end_epoch(began):
                break
            parts.saver.report_warnings()
            if step % FLUSH_STEPS == 0:
                parts.outcome.clock.flush()
            flags = control.after_steps(step - before)
            if flags.stop and step < run_plan.num_steps:
                parts.outcome.clock.flush()
                parts.saver.save()
                parts.leave_early(flags.reason, step)
            if flags.grow and step < run_plan.num_steps:
                parts.outcome.clock.flush()
                if parts.saver.saved_to_grow(parts.room):
                    parts.leave_early(FOR_MORE, step)
            elif flags.save:  # not after `grow`, which has just tried to save
                parts.saver.save()
            parts.saver.copy()
        parts.outcome.clock.flush()
        parts.saver.writer.wait()
        move_to_center(parts.worker, parts.trainable)
        parts.close(began)
        return parts.outcome

    def _free_steps(self, control: Control) -> int:
        """Return how many steps can run without interruption; the same on every rank."""
        parts, run_plan, config = self.parts, self.parts.run_plan, self.parts.config
        # The agreement on the stop comes after the next step, not after a call of many.
        if parts.stop.asked:
            return 1
        step = parts.host.position.step
        limits = config.safety.divergence_check_steps, config.checkpoint.local_checkpoint_every
        every = [each for each in (run_plan.steps_per_epoch, FLUSH_STEPS, *limits) if each]
        return min(control.free_steps(), run_plan.num_steps - step, *(each - step % each for each in every))

    def _end_epoch(self, began: float) -> bool:
        """Sum the totals over the workers and evaluate. Return whether the target accuracy is reached."""
        parts = self.parts
        parts.seen.doing("evaluating")
        parts.seen.recorder.quiesced(parts.group)
        parts.outcome.clock.flush()
        # Each worker has the moving statistics of its own batches; one model is evaluated.
        state.average_moving_statistics(parts.model, parts.group)
        seconds = time.monotonic() - began
        totals = parts.host.position.totals.copy()
        if parts.group.size > 1:
            parts.group.allreduce(totals)
        step = parts.host.position.step
        epoch = step / parts.run_plan.steps_per_epoch
        reached = parts.end_epoch(epoch, step, seconds, (totals[1:] / totals[0]).tolist())
        parts.host.position.take_totals()  # after all that may fail: survivors of a failure repeat this epoch end
        self._owes_epoch_end = False
        return reached

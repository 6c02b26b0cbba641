"""Recovery in place: if ranks are lost, the survivors make a smaller group and repeat the interrupted step.

supervision/regroup.py makes the smaller group; rank/serve.py is the servers' side. The rest is like a run resumed on
fewer workers (run/shrink.py), except that the state is in memory. On each rank a step changes all weights or none, so
survivors are at most one step apart. Those behind take the weights of one that is ahead. With a center these are the
center's weights; each worker keeps its own, so one that was behind has missed a gradient. A center held by servers is
assembled from the survivors' parts (strategies/base/salvage.py). If workers do not step together, the center's update
count gives the run's position. A gradient counts if a server applied it, even if its worker got no reply. Workers that
exchange only every few steps may be several steps apart: those behind first catch up (`level`), and each keeps its own
weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from hpcdl.checkpoint.memory import LocalCopies
from hpcdl.cluster.status import FOLDER, report_left
from hpcdl.comm.observed import EXCHANGE, Observed
from hpcdl.core.errors import BrokenGroup
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.run_record import HistoryPoint, RunRecord, from_json, write_record
from hpcdl.core.storage.lock import writing
from hpcdl.rank import results
from hpcdl.rank.parts import Trainer
from hpcdl.rank.saver import assign_all, move_to_center
from hpcdl.run import rundir
from hpcdl.run.journal import Journal, all_events, since_start
from hpcdl.run.plan import RunPlan
from hpcdl.run.shrink import ShrunkRun, describe_change
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.salvage import Center, gather_center
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.flat import unpacked
from hpcdl.strategies.table import load_strategy
from hpcdl.supervision.regroup import in_time, surviving_ranks, surviving_roles, who_was_lost
from hpcdl.supervision.watchdog import Watchdog

LOCK_S = 5.0
"""How long a dead rank may hold its locks: as long as its process takes to exit."""


@dataclass(kw_only=True)
class Recovery:
    """What happened to a broken group, and the seconds of each part: `detect` starts at the last heartbeat."""

    began_s: float
    lost: dict[int, str] = field(default_factory=dict)
    """Hosts of the ranks lost this time, by their rank in the world."""
    seconds: dict[str, float] = field(default_factory=dict)
    continues: str = ""
    """A description of the workers that continue."""
    step: int = 0
    """The step after which they continue."""

    def over(self, part: str) -> None:
        """Record the time of `part`, and start that of the next part."""
        now_s = time.monotonic()
        self.seconds[part] = now_s - self.began_s
        self.began_s = now_s

    def log_to(self, journal: Journal) -> None:
        """Log the recovery: a message for the user, the seconds of each part for tools."""
        total_s = sum(self.seconds.values())
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items())
        who = who_was_lost(self.lost)
        text = f"{who}; {self.continues}; in place, after step {self.step}, in {total_s:.2f} s ({parts})"
        journal.write(
            "message", text=text, recovery={"lost": sorted(self.lost), "step": self.step, "seconds": self.seconds}
        )


@dataclass(frozen=True, kw_only=True)
class SurvivorState:
    """The run's position according to the most advanced survivor, `leader` of the remaining group."""

    leader: int
    step: int
    facts: dict[str, Any]
    saved: int | None
    seconds_to_target: float | None
    apart: bool

    @property
    def owes_epoch_end(self) -> bool:
        """Whether an epoch was complete and had not been evaluated."""
        history = self.facts["history"]
        ends = self.step > 0 and (
            self.step % self.facts["steps_per_epoch"] == 0 or self.step == self.facts["num_steps"]
        )
        return ends and not (history and history[-1]["step"] == self.step)


def _agree(group: Observed, trainer: Trainer, center: Center | None) -> SurvivorState:
    """Agree on the state from which `group` continues. Afterwards all models hold the leader's weights, or the center.

    The center is `center` if servers hold it.
    """
    parts = trainer.parts
    facts = {**parts.host.facts(), "num_steps": parts.run_plan.num_steps, **trainer.progress(center)}
    own_state = {
        "step": parts.host.steps_done(),
        "facts": facts,
        "saved": parts.saver.writer.newest,
        "seconds_to_target": parts.outcome.seconds_to_target,
    }
    answers = group.allgather_json(own_state)
    # Of ranks at the same step, the one with the longer history has already counted the end of the epoch.
    progress = [(one["step"], len(one["facts"]["history"])) for one in answers]
    leader = progress.index(max(progress))
    apart = len({one["step"] for one in answers}) > 1
    saved = max((one["saved"] for one in answers if one["saved"] is not None), default=None)
    parts.host.leave(undone=own_state["step"] == answers[leader]["step"])  # else its part of the leader's step counts
    parts.keep_own_statistics()  # before another rank's weights, below, replace them
    if center is None:
        move_to_center(parts.worker, parts.trainable)
    else:
        assign_all(parts.trainable, unpacked(center.values, [tuple(one.shape) for one in parts.trainable]))
    if apart:
        broadcast_variables(group, [*parts.model.weights, *parts.host.optimizer.variables], leader)
    return SurvivorState(**{**answers[leader], "saved": saved}, leader=leader, apart=apart)


def _go_on(trainer: Trainer, survivor: SurvivorState) -> None:
    """Set the trainer, whose parts have joined the remaining group, to the run's position."""
    parts, before = trainer.parts, trainer.parts.host.position
    position_array = numpy.array([survivor.step, survivor.facts["seconds"]])
    position = trainer.position_at(
        survivor.step, survivor.facts, {"position": position_array, "totals": numpy.zeros_like(before.totals)}
    )
    if len(parts.outcome.history) == len(survivor.facts["history"]):  # else its sums belong to a finished epoch
        position.totals += before.totals
    parts.resume(position, [from_json(HistoryPoint, point) for point in survivor.facts["history"]])
    parts.saver.writer.newest = survivor.saved
    parts.outcome.seconds_to_target = survivor.seconds_to_target
    parts.saver.copies.resume(position.step)
    trainer.owe_epoch_end(survivor.owes_epoch_end)


@dataclass(kw_only=True)
class InPlaceRecovery:
    """Trains on the ranks of `world`, and continues with the survivors when some are lost.

    `shrunk` has the run's current settings and `record` is its record. `train` trains to the end with the ranks of a
    group. The first survivor opens the journal with `open_journal`; `copies_in` a group returns what keeps a rank's
    copies.
    """

    trainer: Trainer
    world: Observed
    context: Context
    record: RunRecord
    run_dir: Path
    watch: Watchdog
    shrunk: ShrunkRun
    train: Callable[[Trainer, Observed, RunRecord, Path], Observed]
    open_journal: Callable[[], Journal]
    copies_in: Callable[[Communicator], LocalCopies]
    last: Recovery | None = None
    """The most recent recovery."""

    def to_the_end(self) -> Observed:
        """Train until the end with the surviving ranks; return their group."""
        self.trainer.parts.host.may_repeat()
        world = self.world
        with contextlib.ExitStack() as stack:
            while True:
                self.trainer.parts.check_alive = world.check_alive
                try:
                    world = self.train(self.trainer, world, self.record, self.run_dir)
                    world.barrier()  # a rank lost before this point is handled before all is written
                    return world
                except BrokenGroup:
                    recovery = Recovery(began_s=self.world.monitor.moved_s())
                # Not in the except block: the error keeps the step's memory and the batches with their threads alive.
                with in_time(self.watch):
                    world = self._mended(recovery, stack)

    def _mended(self, recovery: Recovery, held: contextlib.ExitStack) -> Observed:
        """Return the group of the survivors, once each of them is at the common position."""
        trainer, parts, before = self.trainer, self.trainer.parts, self.shrunk
        unlogged, led = parts.host.once_after is not None, parts.group.rank == 0
        parts.host.after_last()  # logs a recovery after which no step has ended
        recovery.over("detect")
        world, recovery.lost = surviving_ranks(self.world, self.watch, parts.abandon_group)
        workers, servers = surviving_roles(world, self.context.num_workers, before.least, recovery.lost)
        recovery.over("shrink")
        center = gather_center(world, parts.worker.part()) if servers else None
        group = world.split(0) if servers else world  # the servers take part with `split(1)`
        if center is not None:
            center.share(group)
        parts.host.count_broken()
        parts.worker.level(group, parts.host.position.step, parts.take_steps)
        kept_state, leads = parts.worker.kept(), group.rank == 0
        if leads and not led:
            trainer.take_over(since_start(all_events(self.run_dir)))
        survivor = _agree(group, trainer, center)
        self.shrunk = before.on(world.size, servers)
        # The data set in use, which may be a staged copy or preprocessed.
        run_plan = dataclasses.replace(self.shrunk.run_plan(), dataset=parts.run_plan.dataset)
        if leads:
            self._lead(recovery, held, new=not led)
            if unlogged and not led and self.last is not None:  # the rank that had to log the previous recovery is lost
                self.last.log_to(parts.journal)
        self.last = recovery
        context = dataclasses.replace(
            self.context,
            communicator=world.for_purpose(EXCHANGE),
            num_workers=workers,
            num_servers=servers,
            weight=run_plan.weight_of(group.rank),
        )
        worker = load_strategy(run_plan.info).worker(context)
        worker.restore(kept_state)
        if center is not None:
            worker.take_center(center)
        parts.join(run_plan, worker, group, parts.journal, self.copies_in(group))
        trainer.rejoin()
        _go_on(trainer, survivor)
        self._note(world, run_plan)
        world.barrier()  # a rank that is lost until here may have held a part of the state
        recovery.over("state")
        lost = "" if center is None else center.log_line()
        recovery.continues = describe_change(before.resolved, self.shrunk.resolved) + lost
        recovery.step = parts.host.steps_done()
        parts.host.once_after = lambda: self._log(recovery)
        return world

    def _lead(self, recovery: Recovery, held: contextlib.ExitStack, *, new: bool) -> None:
        """Do what the first survivor does for all; `new` if another rank did it before."""
        for rank in recovery.lost:  # the starting process waits for the other ranks only
            report_left(self.run_dir / FOLDER, rank, who_was_lost(recovery.lost))
        if new:
            held.enter_context(writing(self.run_dir / FOLDER, LOCK_S))  # until the run ends, not this recovery alone
            self.trainer.parts.host.journal = self.open_journal()

    def _note(self, left: Observed, run_plan: RunPlan) -> None:
        """Update record and settings, as for a run resumed on fewer workers. Collective."""
        hosts = left.allgather_json(left.host)
        fresh = results.first_record(run_plan, hosts, self.record.software, self.record.profile)
        self.record = dataclasses.replace(
            fresh,
            warnings=self.record.warnings,
            intra_op_threads=self.record.intra_op_threads,
            inter_op_threads=self.record.inter_op_threads,
        )
        if left.rank == 0:
            self.record = results.continued_record(self.record, self.run_dir, self.trainer.parts.host.steps_done())
            write_record(self.run_dir, self.record)
            rundir.create(self.run_dir, self.shrunk.resolved, {rundir.CHECKSUM: run_plan.dataset.checksum})

    def _log(self, recovery: Recovery) -> None:
        recovery.over("trace")
        recovery.log_to(self.trainer.parts.journal)

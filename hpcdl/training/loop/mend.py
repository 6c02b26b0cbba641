"""Going on in place: where a rank is lost, those that are left make a smaller group and repeat the step under way.

MPI's ULFM (Bland et al. 2013) gives three things: an operation that a dead rank takes part in ends in an error,
`revoke` calls everybody else out of what they wait for, and `shrink` makes a group of those that are left. All else is
a resumed run on fewer workers (training/launch/fewer.py), but for the state, which is in memory: a step's weights move
on a rank at once or not at all, so survivors are at most one step apart, and those behind take the weights of one that
is not.

A rank that is lost while the group is being mended, and anything that takes longer than MOST_S, ends this launch: new
ranks go on then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.cluster.status import FOLDER, report_left
from hpcdl.comm.observed import EXCHANGE, Observed
from hpcdl.core.errors import BrokenGroup, RankError
from hpcdl.core.lock import writing
from hpcdl.core.protocols import Communicator
from hpcdl.core.records import HistoryPoint, RunRecord, from_json, write_record
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base import Context
from hpcdl.strategies.table import load_strategy
from hpcdl.training.checkpoint.local import LocalCopies
from hpcdl.training.launch import rundir
from hpcdl.training.launch.fewer import told
from hpcdl.training.launch.in_place import Fewer
from hpcdl.training.launch.prepare import Prepared
from hpcdl.training.loop import results
from hpcdl.training.loop.journal import Journal
from hpcdl.training.loop.parts import Parts
from hpcdl.training.loop.synchronous import Trainer
from hpcdl.training.session.watch import Watch

MOST_S = 30.0
"""It takes a second or so; a file system that is slow, and a machine that is full, may make more of it."""
LOCK_S = 5.0
"""How long a dead rank may hold what it has locked: as long as its process takes to go."""


@dataclass(kw_only=True)
class Recovery:
    """What became of a broken group, and the seconds of each part: `detect` is from the last sign of life on."""

    began_s: float
    lost: dict[int, str] = field(default_factory=dict)
    """Hosts of the ranks that were lost this time, by their numbers in the world."""
    seconds: dict[str, float] = field(default_factory=dict)
    goes_on: str = ""
    """With how many workers."""
    step: int = 0
    """The step after which they go on."""

    def over(self, part: str) -> None:
        """`part` is over, and the next one begins."""
        now_s = time.monotonic()
        self.seconds[part] = now_s - self.began_s
        self.began_s = now_s

    def tell(self, journal: Journal) -> None:
        """What has become of it, for the user, and by parts for tools."""
        total_s = sum(self.seconds.values())
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items())
        text = f"{self.who}; {self.goes_on}; in place, after step {self.step}, in {total_s:.2f} s ({parts})"
        journal.write(
            "message", text=text, recovery={"lost": sorted(self.lost), "step": self.step, "seconds": self.seconds}
        )

    @property
    def who(self) -> str:
        """The lost ranks, as a sentence begins."""
        names = [f"rank {rank} on {host}" for rank, host in sorted(self.lost.items())]
        return f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} lost"


@contextlib.contextmanager
def _in_time(watch: Watch) -> Iterator[None]:
    """Inside, a group is mended. RankError where it breaks again; where it takes too long, the watch ends the rank."""
    host, rank = watch.observation.host, watch.observation.rank

    def give_up() -> None:
        text = f"rank {rank} on {host}: those that are left have not found together in {MOST_S:g} s"
        watch.actions.end(RankError(text, rank=rank, host=host, lost=True))

    timer = threading.Timer(MOST_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BrokenGroup as error:
        text = f"another rank was lost while the group was being mended: {error}"
        raise RankError(text, rank=rank, host=host, lost=True) from error
    finally:
        timer.cancel()


def _those_left(world: Observed, parts: Parts, recovery: Recovery, watch: Watch) -> Observed:
    """The group of the ranks of `world` that are left; every one of them calls."""
    seen = world.observation
    seen.doing("making a group of the ranks that are left")
    world.revoke()
    parts.abandon_group()
    left = world.survivors()
    lost = frozenset(range(world.size)) - set(left.lane.members)
    recovery.lost = {rank: watch.hosts.get(rank, "a host unknown yet") for rank in lost - seen.lost}
    seen.lost = lost
    return left


def _check_enough(left: Observed, least: int, recovery: Recovery) -> None:
    """RankError where fewer workers are left than may go on."""
    if left.size < least:
        text = f"{recovery.who}: {left.size} workers are left, --min-workers is {least}"
        raise RankError(text, rank=min(recovery.lost, default=None), lost=True)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where the run stands by the survivor that has come furthest, `leader` of the group that is left."""

    leader: int
    step: int
    facts: dict[str, Any]
    saved: int | None
    seconds_to_target: float | None
    apart: bool

    @property
    def owes_epoch_end(self) -> bool:
        """Whether an epoch was over and nobody had evaluated."""
        history = self.facts["history"]
        ends = self.step > 0 and (
            self.step % self.facts["steps_per_epoch"] == 0 or self.step == self.facts["num_steps"]
        )
        return ends and not (history and history[-1]["step"] == self.step)


def _agree(left: Observed, parts: Parts) -> Standing:
    """What the survivors go on from; those that were behind have its weights afterwards."""
    own = {
        "step": parts.position.step,
        "facts": {**parts.facts(), "num_steps": parts.prepared.num_steps},
        "saved": parts.writer.newest,
        "seconds_to_target": parts.outcome.seconds_to_target,
    }
    answers = left.allgather_json(own)
    progress = [(one["step"], len(one["facts"]["history"])) for one in answers]
    leader = progress.index(max(progress))
    apart = len({one["step"] for one in answers}) > 1
    saved = max((one["saved"] for one in answers if one["saved"] is not None), default=None)
    parts.leave_step(undone=own["step"] == answers[leader]["step"])  # else its part of the leader's step counts
    parts.keep_own_statistics()
    if apart:
        broadcast_variables(left, [*parts.model.weights, *parts.optimizer.variables], leader)
    return Standing(**{**answers[leader], "saved": saved}, leader=leader, apart=apart)


def _go_on(trainer: Trainer, standing: Standing) -> None:
    """Put the trainer, whose parts have joined the group that is left, where the run stands."""
    parts, before = trainer.parts, trainer.parts.position
    position = trainer.position_at(standing.step, standing.facts, {})
    if len(parts.outcome.history) == len(standing.facts["history"]):  # else its sums are of an epoch that is over
        position.totals += before.totals
    parts.resume(position, [from_json(HistoryPoint, point) for point in standing.facts["history"]])
    parts.writer.newest = standing.saved
    parts.outcome.seconds_to_target = standing.seconds_to_target
    parts.copies.resume(position.step)
    trainer.owes_epoch_end = standing.owes_epoch_end


@dataclass(kw_only=True)
class InPlace:
    """A training on the ranks of `world` that goes on with those that are left when some are lost.

    `fewer` is the run as it stands and `record` what it will leave. `train` trains to the end with the ranks of a
    group. For the first of those that are left there is `open_journal`; `copies_in` a group keeps a rank's copies.
    """

    trainer: Trainer
    world: Observed
    context: Context
    record: RunRecord
    run_dir: Path
    watch: Watch
    fewer: Fewer
    train: Callable[[Trainer, Observed, RunRecord, Path], Observed]
    open_journal: Callable[[], Journal]
    copies_in: Callable[[Communicator], LocalCopies]
    last: Recovery | None = None
    """The last time that the group was mended."""

    def to_the_end(self) -> Observed:
        """Train with whoever is left; returns their group."""
        self.trainer.parts.may_repeat_steps()
        left = self.world
        with contextlib.ExitStack() as held:
            while True:
                try:
                    self.train(self.trainer, left, self.record, self.run_dir)
                    left.barrier()  # who is lost up to here is lost before all is written
                    return left
                except BrokenGroup:
                    recovery = Recovery(began_s=self.world.observation.moved_s())
                # Outside: the error holds what the step has used, and the batches with their threads.
                with _in_time(self.watch):
                    left = self._mended(recovery, held)

    def _mended(self, recovery: Recovery, held: contextlib.ExitStack) -> Observed:
        """The group of those that are left, once each of them stands where the run goes on."""
        trainer, parts, before = self.trainer, self.trainer.parts, self.fewer
        untold, led = parts.once_after_step is not None, parts.group.rank == 0
        parts.told_of_step()
        recovery.over("detect")
        left = _those_left(self.world, parts, recovery, self.watch)
        _check_enough(left, before.least, recovery)
        recovery.over("shrink")
        standing = _agree(left, parts)
        self.fewer = before.on(left.size)
        prepared = dataclasses.replace(self.fewer.prepared(), dataset=parts.prepared.dataset)
        if left.rank == 0:
            self._lead(recovery, held, new=not led)
            if untold and not led and self.last is not None:  # who was to tell of the one before is lost
                self.last.tell(parts.journal)
        self.last = recovery
        context = dataclasses.replace(
            self.context,
            communicator=left.for_purpose(EXCHANGE),
            num_workers=left.size,
            weight=prepared.weight_of(left.rank),
        )
        worker = load_strategy(prepared.info).worker(context)
        parts.join(prepared, worker, left, parts.journal, self.copies_in(left))
        _go_on(trainer, standing)
        self._note(left, prepared)
        left.barrier()  # without a rank that is lost meanwhile what came of the state may lack a part
        recovery.over("state")
        recovery.goes_on, recovery.step = told(before.effective, self.fewer.effective), parts.position.step
        parts.once_after_step = lambda: self._tell(recovery)
        return left

    def _lead(self, recovery: Recovery, held: contextlib.ExitStack, *, new: bool) -> None:
        """What the first of those that are left does for all, which another one did before if it is `new`."""
        for rank in recovery.lost:  # the process that has started them waits for the others alone
            report_left(self.run_dir / FOLDER, rank, recovery.who)
        if new:
            held.enter_context(writing(self.run_dir / FOLDER, LOCK_S))
            self.trainer.parts.journal = self.open_journal()

    def _note(self, left: Observed, prepared: Prepared) -> None:
        """The record and the settings, as of a run that is resumed on fewer workers. Collective."""
        hosts = left.allgather_json(left.host)
        fresh = results.first_record(prepared, hosts, self.record.software, self.record.profile)
        self.record = dataclasses.replace(
            fresh,
            warnings=self.record.warnings,
            intra_op_threads=self.record.intra_op_threads,
            inter_op_threads=self.record.inter_op_threads,
        )
        if left.rank == 0:
            self.record = results.continued_record(self.record, self.run_dir, self.trainer.parts.position.step)
            write_record(self.run_dir, self.record)
            rundir.create(self.run_dir, self.fewer.effective, {rundir.CHECKSUM: prepared.dataset.checksum})

    def _tell(self, recovery: Recovery) -> None:
        recovery.over("trace")
        recovery.tell(self.trainer.parts.journal)

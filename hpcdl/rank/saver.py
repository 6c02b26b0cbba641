"""Saves a worker's state into checkpoints and into copies in its node's memory.

Also puts the center of a strategy whose workers differ into a model: temporarily or for good.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.checkpoint import state
from hpcdl.checkpoint.background import BackgroundWork
from hpcdl.checkpoint.folders import CheckpointWriter, Snapshot
from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.checkpoint.memory import LocalCopies
from hpcdl.comm.observed import RankMonitor
from hpcdl.core.errors import NotFiniteError
from hpcdl.core.protocols import Communicator
from hpcdl.faults.inject import Injection
from hpcdl.step.host import HostStep
from hpcdl.strategies.base.strategy import Worker
from hpcdl.supervision.control import Room, check_kept

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


@contextlib.contextmanager
def center_in_place(worker: Worker, variables: Sequence[Any]) -> Iterator[None]:
    """Inside, the trainable `variables` hold the center; afterwards the worker's own values again.

    Collective; does nothing if the strategy has no center.
    """
    center = worker.center()
    if center is None:
        yield
        return
    own_values = [numpy.array(variable) for variable in variables]  # copies: views would change with the variables
    assign_all(variables, center)
    try:
        yield
    finally:
        assign_all(variables, own_values)


def move_to_center(worker: Worker, variables: Sequence[Any]) -> None:
    """Put the center into `variables` for good. Collective."""
    center = worker.center()
    if center is not None:
        assign_all(variables, center)


def assign_all(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign its value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class Saver:
    """Saves what `host` trains. If the strategy's workers differ: its center, and each worker's own part.

    The model stays unchanged: otherwise a run would depend on the times of its checkpoints.
    """

    def __init__(
        self,
        host: HostStep,
        monitor: RankMonitor,
        run_dir: Path,
        injection: Injection,
        interval: CheckpointInterval,
        work: BackgroundWork,
    ) -> None:
        self._host, self._seen, self._run_dir, self._injection = host, monitor, run_dir, injection
        self.interval, self.work = interval, work
        self._memory: dict[str, Array] = {}
        self._memory_of_copies: dict[str, Array] = {}  # apart: a checkpoint may still be written from `_memory`
        self._statistics = [*state.moving_statistics(host.model)]
        self._read_weights = state.reader(host.model.weights)
        self._read_optimizer = state.reader(host.optimizer.variables)
        self._read_seeds = state.reader(state.seed_variables(host.model))
        monitor.at_other_work = lambda: self.writer.is_writing or self.copies.is_writing

    def join(self, together: Communicator, copies: LocalCopies, keep: int) -> None:
        """Save with the workers of `together` from here on; `keep` is the number of checkpoints to keep."""
        self._together, self.copies = together, copies
        self.writer = CheckpointWriter(
            self._run_dir, together, keep, before=self._injection.writing, work=self.work
        )  # fmt: skip
        self._num_reported = 0

    def abandon(self) -> None:
        """Abandon a checkpoint in progress: its group is revoked."""
        self.writer.abandon()
        self.copies.wait()
        self.report_warnings()
        self._host.outcome.warnings += self.writer.warnings

    def own_statistics(self) -> Mapping[str, Array]:
        """Return this worker's moving statistics in the format of a checkpoint."""
        values = self._read_weights()
        return state.own_statistics({index: values[index] for index in self._statistics}, {})

    def save(self, **facts: Any) -> None:
        """Begin a checkpoint, which also holds `facts`."""
        began = time.monotonic()
        self._seen.doing("saving a checkpoint")
        self.writer.wait()  # its writer has then released its memory
        self.report_warnings()
        statistics, shared = self._read_state(self._memory)
        self._check(shared)
        means = state.mean_statistics(statistics, self._together)  # collective: also where nothing is shared
        if shared:
            shared |= {f"weights/{index}": mean for index, mean in means.items()}
        snapshot = self._snapshot(shared, state.own_statistics(statistics, means), facts)
        self.writer.start(snapshot, self.interval.patience_s)
        if line := self.interval.saved(time.monotonic() - began):
            self._host.journal.write("message", text=line)

    def saved_to_grow(self, room: Room, **facts: Any) -> bool:
        """Save a checkpoint to restart with more workers. Return False if it could not be written. Collective.

        `facts` as for `save`. After a failure the run continues with the workers it has.
        """
        self.save(**facts)
        self.writer.wait()
        self.report_warnings()
        if self.writer.newest == self._host.position.step:
            return True
        if self._host.group.rank == 0:
            room.refuse()
            text = "warning: the workers stay as few: no checkpoint could be written"
            self._host.journal.write("message", text=text)
        return False

    def copy(self, **facts: Any) -> None:
        """Begin a copy of the state in the node's memory if one is due; it also holds `facts`.

        Each rank keeps its own moving statistics in full, so that no rank waits for another.
        """
        if not self.copies.due(self._host.position.step):
            return
        self._seen.doing("copying the state")
        self.copies.wait()
        statistics, shared = self._read_state(self._memory_of_copies)
        self._check(shared)
        snapshot = self._snapshot(shared, state.own_statistics(statistics, {}), facts)
        self.copies.start(snapshot, self._host.outcome.clock.last_s)

    def check_weights(self) -> None:
        """Raise NotFiniteError if this worker's weights, which are about to be saved, hold NaN or infinity."""
        self._check({f"weights/{index}": value for index, value in enumerate(self._read_weights())})

    def report_warnings(self) -> None:
        """Log new warnings about checkpoints; the record keeps them too."""
        for warning in self.writer.warnings[self._num_reported :]:
            self._host.journal.write("message", text=f"warning: {warning}")
            self._num_reported += 1

    def _read_state(self, memory: dict[str, Array]) -> tuple[dict[int, Array], dict[str, Array]]:
        """Return the current moving statistics, and on rank 0 copies in `memory` of the state common to all ranks."""
        host, shared = self._host, dict[str, "Array"]()
        with center_in_place(host.worker, host.model.trainable_variables):
            values = self._read_weights()
            if host.group.rank == 0:
                shared |= state.copy_of(values, "weights", memory)
        statistics = {index: values[index] for index in self._statistics}
        del values  # or TensorFlow copies the variables it changes
        if host.group.rank == 0:
            shared |= state.copy_of(self._read_optimizer(), "optimizer", memory)
        return statistics, shared

    def _check(self, shared: Mapping[str, Array]) -> None:
        host = self._host
        kinds = {"weights": host.model.weights, "optimizer": host.optimizer.variables}
        paths = {f"{kind}/{index}": saved.path for kind, those in kinds.items() for index, saved in enumerate(those)}
        try:
            check_kept([(paths[name], value) for name, value in shared.items()], host.steps_done(), host.group.rank)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error}; lower --learning-rate, or add --warmup-epochs; {host.way_back()}"
            ) from error  # fmt: skip

    def _snapshot(self, shared: dict[str, Array], statistics: dict[str, Array], facts: dict[str, Any]) -> Snapshot:
        host = self._host
        own_arrays = {**state.copy_of(self._read_seeds(), "seeds"), **host.position.arrays(), **host.worker.state()}
        return Snapshot(
            step=host.position.step,
            shared=shared,
            own={**own_arrays, **statistics},
            facts={**host.facts(), **facts},
        )

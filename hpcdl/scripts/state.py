"""`hpcdl.State`: save the state of a script at intervals and when its time is over, and restore it."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdl.checkpoint import folders as checkpoints
from hpcdl.checkpoint import state as arrays
from hpcdl.checkpoint.background import OFF, most_patience_s
from hpcdl.checkpoint.folders import ScriptFacts
from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.cluster.status import FOLDER
from hpcdl.core.errors import CorruptError, StoppedEarly, UsageError
from hpcdl.core.processes.streams import StopRequest
from hpcdl.core.records.kept_values import given_back, kept
from hpcdl.core.storage.disk import make_folder
from hpcdl.run.journal import FileJournal
from hpcdl.run.listing import step_to_resume
from hpcdl.scripts.fit.learning_rate import rates_of, set_rates
from hpcdl.scripts.fit.model import center_in_place, exchange_of, optimizers_of
from hpcdl.scripts.fit.variables import kept_by_optimizers, own_variables
from hpcdl.scripts.process.measure import ScriptRun
from hpcdl.scripts.process.session import session
from hpcdl.step.keras_internals import trained_by
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.strategy import Worker
from hpcdl.supervision.control import FOR_MORE, Control, ControlFlags, Room, check_kept, digest_of, time_allowed


class State:
    """Weights, optimizers, random states and `values` of a script (epoch=0, best=0.0), as attributes to read and set.

    Under `hpcdl run --resume` it starts as the last part of the run left it; outside a run from a checkpoint in
    `folder`, if any. `model` and `optimizer` may be lists. Optimizers that models were compiled with, or hold, are
    included. `fit` restores a model without weights; in a custom loop build or call it first. Weights that a plain
    optimizer of these has moved on each rank alone start as rank 0's. Collective.
    """

    epoch: int = 0

    def __init__(self, model: Any, optimizer: Any = None, *, folder: str | Path | None = None, **values: Any) -> None:
        here = session()
        if here.run is None and folder is None:
            raise UsageError("hpcdl.State outside `hpcdl run` needs a place: hpcdl.State(model, folder='checkpoints')")
        self._communicator, self._run = here.communicator, here.run
        self._folder = here.run.run_dir if here.run is not None else Path(folder or "")
        if here.communicator.rank == 0:
            make_folder(self._folder)
            if here.run is not None and folder is not None:
                sys.stderr.write(
                    f"hpcdl: checkpoints are in {self._folder}; folder={str(folder)!r} counts outside `hpcdl run`\n"
                )
        self._models = list(model) if isinstance(model, Sequence) else [model]
        self._given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._names = list({"epoch": 0, **values})
        vars(self).update(values)
        # A value that cannot be kept is refused now, not hours later at the first checkpoint.
        self._kept_values()
        limits = here.run.config.checkpoint if here.run is not None else None
        self._keep = limits.keep_checkpoints if limits else 3
        self._interval = _interval_of(here.run)
        self._stop = StopRequest()
        self._stop.install()
        self._room = Room(self._folder / FOLDER if limits and limits.elastic else None)
        self._control = Control(
            here.communicator,
            self._stop,
            Worker(),
            interval=self._interval,
            time_limit_s=time_allowed(limits.time_limit if limits else None),
            room=self._room,
        )
        self._writer: checkpoints.CheckpointWriter | None = None
        self._pending: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None = None
        self.step = 0
        """Number of committed steps."""
        self._mark_s = time.monotonic()
        self._read()
        self._begin_alike()
        if all(one.built for one in self._models):
            self.restore()

    def _begin_alike(self) -> None:
        """Give all ranks rank 0's values of variables that plain optimizers have moved on each rank alone.

        This includes the optimizers' own variables, which no later gradient names. A distributed tape keeps them equal.
        """
        plain_optimizers = [one for one in self._optimizers() if not hasattr(one, "exchanges") and one.built]
        own_ids = {id(one) for one in self._own_variables()}
        # An optimizer of a rank's own variables (hpcdl.combine) is the rank's own too.
        shared = [one for one in plain_optimizers if not own_ids & {id(weight) for weight in trained_by(one)}]
        listed = {id(one): one for optimizer in shared for one in (*trained_by(optimizer), *optimizer.variables)}
        variables = [one for key, one in listed.items() if key not in own_ids]
        rows = self._communicator.allgather_json(
            [[str(one.dtype), list(one.shape), digest_of(one)] for one in variables]
        )
        if any([form[:2] for form in row] != [form[:2] for form in rows[0]] for row in rows):
            return  # the ranks have different variables: the first exchange compares those that it moves
        differing = [
            one for one, *forms in zip(variables, *rows, strict=True) if any(form != forms[0] for form in forms)
        ]
        broadcast_variables(self._communicator, differing)
        if differing and self._communicator.rank == 0:
            and_more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            text = "were moved on each rank alone, and begin as rank 0's"
            sys.stderr.write(f"hpcdl: {differing[0].path}{and_more} {text} (hpcdl.State)\n")

    def commit(self, samples: int | None = None, *, stepped: bool = True) -> None:
        """Call it after each step: save if due; at a signal or the time limit save and exit with code 75. Collective.

        `samples` of this rank's batch give the throughput in the record. In `fit` hpcdl.callbacks(state) calls it.
        """
        self.step += stepped
        steps = self._communicator.monitor.script_steps
        if stepped and not steps.counted:  # a fit counts its own steps
            steps.over()
        if samples is not None and self._run is not None:
            now_s = time.monotonic()
            self._run.meter.add(now_s - self._mark_s)
            self._run.meter.count(samples, 1)
            self._mark_s = now_s
            self._communicator.monitor.doing("running the script", self.step)
        flags = self._control.after_steps() if stepped else ControlFlags()
        if flags.save or flags.stop:
            self._begin_to_save()
        # In the background the next steps run while it is written; a process that stops has to wait for it.
        if flags.stop or (flags.save and (self._run is None or self._run.work.way == OFF)):
            self._finish_saving()
        if flags.stop:
            raise StoppedEarly(f"stopped by {flags.reason} after step {self.step}, and saved; continue with --resume")
        if flags.grow:
            self._leave_for_more()

    def _leave_for_more(self) -> None:
        """Save, then leave so that more workers can start. If saving fails, these workers continue."""
        self.save()
        if self._writer is not None and self._writer.newest == self.step:
            text = f"stopped by {FOR_MORE} after step {self.step}, and saved; continue with --resume"
            raise StoppedEarly(text, grows=True)
        if self._communicator.rank == 0:
            self._room.refuse()

    def save(self) -> None:
        """Write a checkpoint and return when it is durable. Collective."""
        self._begin_to_save()
        self._finish_saving()

    def _begin_to_save(self) -> None:
        """Begin a checkpoint, as `--background` says, once the previous one is durable."""
        began = time.monotonic()
        if self._writer is None:
            work = None if self._run is None else self._run.work
            self._writer = checkpoints.CheckpointWriter(self._folder, self._communicator, self._keep, work=work)
            if self._run is not None:
                self._run.unfinished.append(self._finish_saving)
        seeds = [variable for model in self._models for variable in arrays.seed_variables(model)]
        values = self._kept_values()
        facts = {
            "ranks": self._communicator.size,
            "values": values,
            "rates": rates_of(self._optimizers()),
            "moves": self._moves(),
        }
        # The shared part of a checkpoint holds the weights that all ranks share, not those of the rank that writes.
        with center_in_place(*self._optimizers()):
            shared = [variable.numpy() for variable in self._weights()]
        of_optimizers = [variable.numpy() for variable in self._of_optimizers()]
        of_weights = [(weight.path, value) for weight, value in zip(self._weights(), shared, strict=True)]
        check_kept(of_weights, self.step, self._communicator.rank)
        self._writer.start(
            checkpoints.Snapshot(
                step=self.step,
                shared={**arrays.copy_of(shared, "weights"), **arrays.copy_of(of_optimizers, "optimizer")},
                own={
                    **arrays.copy_of([variable.numpy() for variable in seeds], "seeds"),
                    **arrays.copy_of([variable.numpy() for variable in self._own_variables()], "variables"),
                    **self._of_exchanges(),
                },
                facts=facts,
            ),
            self._interval.patience_s,
        )
        self._note_cost(time.monotonic() - began)

    def _kept_values(self) -> dict[str, Any]:
        """Return the script's own values as a checkpoint holds them. Raises UsageError for unsupported values."""
        values = {}
        for name in self._names:
            try:
                values[name] = kept(_plain(getattr(self, name)))
            except TypeError as error:
                raise UsageError(
                    f"hpcdl.State cannot keep {name} ({error}): it holds numbers, texts, arrays, and lists and dicts"
                ) from error
        return values

    def _finish_saving(self) -> None:
        """Return when the checkpoint that was begun is durable, or has left a warning."""
        if self._writer is not None:
            self._writer.wait()
            self._log(self._writer.warnings)
            self._writer.warnings.clear()

    def _note_cost(self, stall_s: float) -> None:
        line = self._interval.saved(stall_s)
        if self._run is None:
            return
        self._run.checkpoint_interval = self._interval.choice
        if line and self._communicator.rank == 0:
            with contextlib.closing(FileJournal(self._run.run_dir)) as journal:
                journal.write("message", text=line)

    @property
    def waits(self) -> bool:
        """Whether `restore` has yet to restore what was read."""
        return self._pending is not None

    def restore(self) -> None:
        """Restore what was read, once the models are built. `fit` calls it for models built late. Collective."""
        if self._pending is None:
            return
        (shared, own_arrays, facts), self._pending = self._pending, None
        weights = self._weights()
        for optimizer, moved in zip(self._optimizers(), facts.get("moves", []), strict=False):
            # Without its variables an optimizer has nothing to put its state into.
            if not optimizer.built and moved is not None and all(index < len(weights) for index in moved):
                optimizer.build([weights[index] for index in moved])
        if self._communicator.rank == 0:
            # Rank 0 alone has read what is shared; the broadcast gives it to the others.
            arrays.assign(self._weights(), shared, "weights")
            arrays.assign(self._of_optimizers(), shared, "optimizer")
        broadcast_variables(self._communicator, [*self._weights(), *self._of_optimizers()])
        set_rates(self._optimizers(), facts.get("rates", []))
        seeds = [one for model in self._models for one in arrays.seed_variables(model)]
        if own_arrays:
            arrays.assign(seeds, own_arrays, "seeds")
        if any(name.startswith("variables/") for name in own_arrays):
            arrays.assign(self._own_variables(), own_arrays, "variables")
        for index, exchange in self._exchanges():
            prefix = f"center/{index}/"
            exchange.restore(
                {name.removeprefix(prefix): one for name, one in own_arrays.items() if name.startswith(prefix)}
            )

    def _read(self) -> None:
        """Read the newest intact checkpoint. Its values count at once; its arrays wait for `restore`."""
        problems: list[str] = []
        rank = self._communicator.rank
        from_step = None if self._run is None else self._run.config.checkpoint.from_step
        newest_step = step_to_resume(self._folder, from_step, problems, ScriptFacts) if rank == 0 else None
        missing = checkpoints.what_is_missing(self._folder) if rank == 0 and newest_step is None else ""
        shared: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        if newest_step is not None:
            shared, facts = checkpoints.read_shared(self._folder, newest_step)
        cause = problems[0].partition("; going back")[0] if problems and newest_step is None else ""
        # From rank 0 alone: all ranks must continue from one checkpoint, and say the same of a damaged one.
        step, facts, damaged, missing = self._communicator.allgather_json([newest_step, facts, cause, missing])[0]
        if missing:
            raise UsageError(f"{missing}; put it back, or name another folder")
        if damaged:
            raise CorruptError(
                f"every checkpoint in {self._folder} is damaged ({damaged}); start again in another folder"
            )
        if step is None:
            return
        self.step = step
        self._communicator.monitor.script_steps.reached(step)
        values = given_back(facts["values"])
        vars(self).update({name: value for name, value in values.items() if name in self._names})
        # With another number of ranks no rank's own state belongs to one of these.
        own_arrays = checkpoints.read_own(self._folder, step, rank) if facts["ranks"] == self._communicator.size else {}
        self._pending = shared, own_arrays, facts
        if self._run is not None:
            self._run.resumed_from.append(step)
        self._log(problems)

    def _log(self, warnings: Sequence[str]) -> None:
        """Add warnings to the run's record, or print them on stderr if there is no run."""
        if self._run is not None:
            self._run.warnings += [text for text in warnings if text not in self._run.warnings]
        else:
            sys.stderr.writelines(f"hpcdl: {text}\n" for text in warnings)

    def _weights(self) -> list[Any]:
        return [weight for model in self._models for weight in model.weights]

    def _own_variables(self) -> list[Any]:
        """Return the variables that each rank keeps for itself: queues, counters, accumulated gradients."""
        variables = [
            *(variable for model in self._models for variable in own_variables(model)),
            *kept_by_optimizers(self._given),
        ]
        return list({id(variable): variable for variable in variables}.values())

    def _optimizers(self) -> list[Any]:
        optimizers = [*self._given, *(optimizer for model in self._models for optimizer in optimizers_of(model))]
        return list({id(optimizer): optimizer for optimizer in optimizers}.values())

    def _exchanges(self) -> list[tuple[int, Any]]:
        """Return the exchanges of weights or gradients, each with the index of its optimizer."""
        numbered = enumerate(map(exchange_of, self._optimizers()))
        return [(index, exchange) for index, exchange in numbered if exchange is not None]

    def _of_exchanges(self) -> dict[str, Any]:
        return {
            f"center/{index}/{name}": value
            for index, exchange in self._exchanges()
            for name, value in exchange.state().items()
        }

    def _moves(self) -> list[Any]:
        """Return the indices of the weights that each optimizer moves, or None for an optimizer that is not built."""
        number = {id(weight): index for index, weight in enumerate(self._weights())}
        return [
            [number[id(weight)] for weight in trained_by(optimizer) if id(weight) in number]
            if optimizer.built
            else None
            for optimizer in self._optimizers()
        ]

    def _of_optimizers(self) -> list[Any]:
        return [variable for optimizer in self._optimizers() for variable in optimizer.variables]


def _interval_of(run: ScriptRun | None) -> CheckpointInterval:
    """Return the checkpoint interval of the run's settings, or ten minutes outside a run."""
    if run is None or run.started is None:
        return CheckpointInterval(600.0, node_mtbf_s=math.inf, num_nodes=1)
    limits = run.config.checkpoint
    return CheckpointInterval(
        limits.checkpoint_every,
        node_mtbf_s=limits.mtbf,
        num_nodes=run.started.nodes,
        most_patience_s=most_patience_s(run.work.way, run.config.safety.stall_timeout),
    )


def _plain(value: Any) -> Any:
    """Return a script's value with Python numbers in place of arrays and tensors."""
    if isinstance(value, dict):
        return {_plain(key): _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        values = [_plain(element) for element in value]
        return tuple(values) if isinstance(value, tuple) else values
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.tolist() if hasattr(value, "tolist") else value

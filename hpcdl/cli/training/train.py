"""`hpcdl train`: train a network with a parallel strategy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import (
    ConfigFlag,
    JsonFlag,
    QuietFlag,
    SetFlag,
    TrustFlag,
    begin,
    resolved,
    takes_settings,
)
from hpcdl.cli.output import print_json, put, say
from hpcdl.config.load import Layer
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import quoted, typed
from hpcdl.core.progress import Progress, progress
from hpcdl.core.units import counted, format_measure, format_rate, format_seconds

if TYPE_CHECKING:
    from hpcdl.core.records.run_record import RunRecord


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check settings, model and data, and print the plan; start nothing.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    epilog = "Example: hpcdl train --model lenet --data shards --strategy ring --ranks 2 --epochs 5"
    app.command(cls=GroupedCommand, epilog=epilog)(train)


@takes_settings(TrainConfig)
def train(
    flags: dict[str, Any],
    config: ConfigFlag = None,
    set_: SetFlag = None,
    dry_run: DryRun = False,
    json: JsonFlag = False,
    trust: TrustFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train a network on one rank or on many.

    On this node with --ranks N, or as one rank under mpiexec or srun.
    """
    from hpcdl.core.records.run_record import read_record
    from hpcdl.launch import train as launch
    from hpcdl.run.plan import rule_in_force

    settings = resolved(
        TrainConfig,
        "train",
        flags,
        config,
        set_,
        below=_resumed(flags, trust, from_file=config is not None or bool(set_)),
    )
    if dry_run:
        run_plan = launch.check(settings)
        if run_plan.config.run.run_dir:
            launch.check_run_dir(run_plan, run_plan.config.run.run_dir)
        steps = {"workers": run_plan.num_workers, "steps": run_plan.num_steps, "global_batch": run_plan.global_batch}
        print_json(steps) if json else put(rule_in_force(run_plan))
        return
    process = begin(settings, quiet=quiet)
    if process is None:
        with Follower(quiet=quiet) as follower:
            run_dir, record = launch.train(settings, follower.show)
    else:
        with Follower(quiet=quiet) as follower:
            run_dir = launch.train_inside(settings, process, follower.show)
        if process.rank != 0:
            return
        record = read_record(run_dir)
    if json:
        print_json({"run_dir": str(run_dir), "record": dataclasses.asdict(record)})
    else:
        print_summary(run_dir, record, printed=follower.printed, advise=not quiet)


def _resumed(flags: dict[str, Any], trust: bool, *, from_file: bool) -> list[Layer]:
    """Return the settings of the run to continue with --resume. Raises UsageError without a folder.

    A missing folder is allowed if a run can begin in it: a job that requeues itself always passes --resume.
    `from_file`: settings may come from a --config file.
    """
    if not flags["resume"]:
        return []
    if not flags["run-dir"]:  # empty: an unset variable of a script
        raise UsageError("--resume needs to know which run: add --run-dir DIR")
    from hpcdl.run.rundir import check_trusted, resume_layer

    check_trusted(Path(flags["run-dir"]), trust)
    layers = resume_layer(Path(flags["run-dir"]))
    if not layers and flags["model"] is None and not from_file:
        raise UsageError(f"{flags['run-dir']} holds no run of `hpcdl train`; `hpcdl runs` lists what there is")
    return [_without_other_length(layer, flags) for layer in layers]


def _without_other_length(layer: Layer, flags: dict[str, Any]) -> Layer:
    """Return a run's settings without its --steps if --epochs is given, and the other way round."""
    left_out = {"epochs"} if flags["steps"] is not None else {"steps"} if flags["epochs"] is not None else set()
    return dataclasses.replace(layer, values={key: layer.values[key] for key in layer.values if key not in left_out})


_USUAL_METRICS = ("accuracy", "top5_accuracy")
"""Metrics of every classifier, which nobody has asked for: the summary shows the first, `evaluate` both."""


def print_summary(run_dir: Path, record: RunRecord, *, printed: Container[str] = (), advise: bool = True) -> None:
    """Print the result in a few lines, with warnings not in `printed`; with `advise`, also the next command."""
    facts = []
    measured = record.history[-1].val_metrics if record.history else {}
    held_out = "held-out " if record.history and record.history[-1].val_loss is not None else ""
    if record.images_per_second:
        facts.append(format_rate(record.images_per_second, record.counted))
    if record.accuracy is not None:
        facts.append(f"{held_out}accuracy {format_measure(record.accuracy)}")
    if record.loss is not None:
        facts.append(f"{held_out}loss {format_measure(record.loss)}")
    facts += [f"{name} {format_measure(value)}" for name, value in measured.items() if name not in _USUAL_METRICS]
    workers = counted(record.workers, "worker")
    put(f"{quoted(run_dir)}: {counted(record.steps, 'step')} on {workers}; {', '.join(facts)}")
    for text in (f"warning: {warning}" for warning in record.warnings):
        if text not in printed:
            say(text)
    warn_of_affinity(record)
    if advise:
        say(f"next: {typed('report', run_dir, '--out', run_dir / 'report')}")


def warn_of_affinity(record: RunRecord) -> None:
    """Print where the ranks computed, if OpenMP's variable asks for it: TensorFlow's threads ignore that variable."""
    if os.environ.get("OMP_DISPLAY_AFFINITY", "").lower() != "true":
        return
    for rank in record.rank_records:
        threads = f", {counted(record.intra_op_threads, 'thread')} an operation" if record.intra_op_threads else ""
        say(f"rank {rank.rank} on {rank.host}{threads}: affinity {rank.processors or 'unknown'}")


class Follower:
    """Shows a run's journal: a bar for steps, a line for messages and epochs; if `quiet`, only warnings."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.printed: set[str] = set()
        """Messages that have been shown."""
        self._bar: Progress | None = None
        self._counted = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, trace)

    def show(self, event: dict[str, Any]) -> None:
        """Draw one event."""
        {"start": self._start, "step": self._step, "epoch": self._epoch, "message": self._message}[event["kind"]](event)

    def _start(self, event: dict[str, Any]) -> None:
        self._counted = event["counted"]
        self._bar = progress("training", event["steps"], enabled=not self._quiet)
        self._bar.__enter__()

    def _step(self, event: dict[str, Any]) -> None:
        if self._bar is not None:
            rate = format_rate(event["images_per_second"], self._counted)
            loss = "not finite" if event["loss"] is None else format_measure(event["loss"])
            self._bar.update(event["step"], f"step {event['step']}  {rate}  loss {loss}")

    def _epoch(self, event: dict[str, Any]) -> None:
        if self._quiet:
            return
        classifies = event["val_accuracy"] is not None
        shown = {
            "loss": event["loss"],
            "accuracy": event["accuracy"],
            "held-out": event["val_accuracy"] if classifies else None,
            "held-out loss": None if classifies else event["val_loss"],
        }
        numbers = "  ".join(f"{name} {format_measure(value)}" for name, value in shown.items() if value is not None)
        epoch = f"{event['epoch']:.3g}" if event["epoch"] < 100 else f"{event['epoch']:.0f}"
        # "after", because a number of milliseconds behind a step would read as the step's own time.
        say(f"epoch {epoch}  step {event['step']}  after {format_seconds(event['seconds'])}  {numbers}")

    def _message(self, event: dict[str, Any]) -> None:
        if not self._quiet or event["text"].startswith("warning"):
            self.printed.add(event["text"])
            say(event["text"])

"""`hpcdl infer`: a trained model's outputs for a whole data set, on one rank or on many."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import ConfigFlag, JsonFlag, QuietFlag, SetFlag, TrustFlag, begin, resolved, takes_settings
from hpcdl.cli.output import print_json, put, say
from hpcdl.config.commands import InferConfig
from hpcdl.core.paths import quoted, typed
from hpcdl.core.units import counted, format_rate, format_seconds

if TYPE_CHECKING:
    from hpcdl.core.records.run_record import RunRecord


def register(app: typer.Typer) -> None:
    """Add the command."""
    epilog = "Example: hpcdl infer runs/20260314-lenet-ring --data shards --out outputs --ranks 4"
    app.command(cls=GroupedCommand, epilog=epilog)(infer)


@takes_settings(InferConfig)
def infer(
    flags: dict[str, Any],
    model: Annotated[
        Path, typer.Argument(metavar="RUN|MODEL.keras", help="Folder of a run, or a model saved by Keras.")
    ],
    config: ConfigFlag = None,
    set_: SetFlag = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
    trust: TrustFlag = False,
) -> None:
    """Compute a trained model's outputs for a whole data set.

    On this node with --ranks N, or as one rank under mpiexec or srun. Outputs go into verified HDF5 shards.
    """
    from hpcdl.core.records.run_record import read_record
    from hpcdl.launch import infer as launch
    from hpcdl.run.rundir import check_trusted

    settings = resolved(InferConfig, "infer", flags, config, set_)
    check_trusted(model, trust)
    process = begin(settings, quiet=quiet)
    shown: set[str] = set()

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "message" and (not quiet or event["text"].startswith("warning")):
            shown.add(event["text"])
            say(event["text"])

    out = settings.config.run.out
    if process is None:
        record = launch.infer(settings, model, on_event)
    else:
        launch.infer_inside(settings, model, process, on_event)
        if process.rank != 0:
            return
        record = read_record(out)
    if json:
        print_json({"out": str(out), "record": dataclasses.asdict(record)})
    else:
        _print_summary(out, record, shown, advise=not quiet)


def _print_summary(out: Path, record: RunRecord, printed: Container[str], *, advise: bool) -> None:
    inference = record.inference
    if inference is None:
        return
    facts = [f"{inference.num_computed + inference.num_kept} samples in {counted(inference.num_shards, 'shard')}"]
    if record.images_per_second is not None and record.seconds_total is not None:
        part = f"{inference.num_computed:,} of them " if inference.num_kept else ""
        took = f"{format_seconds(record.seconds_total)} on {counted(record.ranks, 'rank')}"
        facts.append(f"{part}computed in {took}, {format_rate(record.images_per_second, record.counted)}")
    if inference.batch_seconds_median is not None and inference.batch_seconds_p99 is not None:
        median, most = format_seconds(inference.batch_seconds_median), format_seconds(inference.batch_seconds_p99)
        facts.append(f"a batch of {record.batch_per_rank} in {median} (median; 99 % below {most})")
    if inference.first_batch_seconds is not None:
        facts.append(f"the first in {format_seconds(inference.first_batch_seconds)}, with the compilation")
    put(f"{quoted(out)}: {'; '.join(facts)}")
    for text in (f"warning: {warning}" for warning in record.warnings):
        if text not in printed:
            say(text)
    if advise:
        say(f"next: {typed('inspect', out, '--verify')}")

"""`hpcdl shard`: from any source to verified shards."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcdl.cli.options import ConfigFlag, JsonFlag, QuietFlag, SetFlag, resolved, takes_settings
from hpcdl.cli.output import Commentary, print_json, say
from hpcdl.core.paths import typed
from hpcdl.core.processes.signals import caught
from hpcdl.core.protocols import Communicator
from hpcdl.core.units import counted, format_bytes, format_count, format_seconds
from hpcdl.data.write.request import ShardConfig, ShardRequest
from hpcdl.models.table import network_for


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="shard", epilog="Example: hpcdl shard images shards --image-size 224 --split train=0.9,val=0.1")(
        shard
    )


@takes_settings(ShardConfig)
def shard(
    flags: dict[str, Any],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or file of samples, or synthetic:NAME.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make.")],
    reader: Annotated[
        str,
        typer.Option(
            "--reader", metavar="FILE.py:NAME", help="Your own function or class that reads SOURCE; its code is run."
        ),
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Resume where an earlier call stopped.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    config: ConfigFlag = None,
    pairs: SetFlag = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Pack images, or samples of any fields, from any source into HDF5 shards."""
    settings = resolved(ShardConfig, "shard", flags, config, pairs)
    request = ShardRequest(source=source, target=folder, config=settings.config, resume=resume, reader=reader)
    from hpcdl.data.write import writing

    commentary = Commentary(quiet=quiet)
    planned = functools.partial(_show_plan, tell=commentary.say)
    if dry_run:
        job = writing.dry_run(request)
        _show_plan(job, tell=say)
        if json:
            print_json(_plan_document(job))
        return
    communicator = _ranks()
    with caught(_as_ctrl_c, (signal.SIGTERM, signal.SIGHUP)):
        try:
            report = writing.shard(request, communicator=communicator, planned=planned)
        except writing.OtherRankFailed as error:
            raise typer.Exit(error.exit_code) from None
    if communicator is not None and communicator.rank:
        return
    if json:
        print_json(_report_document(report, folder))
        return
    _show_report(report, folder, commentary)


def _ranks() -> Communicator | None:
    """The ranks of the launcher that started this process, if one did."""
    from hpcdl.cluster.environment import placement

    place = placement()
    if place is None or place.size == 1:
        return None
    from hpcdl.comm.mpi.communicator import world

    return world(place.size)


def _as_ctrl_c(number: int) -> None:
    """A scheduler's SIGTERM and a terminal that closes stop as Ctrl-C does: whole shards stay for --resume."""
    raise KeyboardInterrupt


def _show_plan(job: Any, *, tell: Callable[[str], None]) -> None:
    plan = job.plan
    shape = "x".join(str(side) for side in job.sample_shape)
    classes, size = format_count(len(job.facts.class_names)), format_bytes(plan.total_bytes)
    if job.spec.reader:
        tell(f"reader: {job.spec.reader}, SHA-256 {job.spec.reader_digest}")
    if job.pictures:
        tell(f"plan: {job.spec.format} -> {job.encoding} {shape} {job.dtype}, {classes} classes, {size}")
    else:
        tell(f"plan: {job.spec.format} -> {len(job.fields)} fields, {size}")
        for item in job.fields:
            tell(f"  {item.describe()}")
    for line in job.facts.remarks:
        tell(f"  {line}")
    for name, count in plan.shards.items():
        tell(f"  {name}: {counted(plan.num_samples[name], 'sample')} in {counted(count, 'shard')}")
    for reason in plan.reasons:
        tell(f"  {reason}")


def _show_report(report: Any, target: Path, commentary: Commentary) -> None:
    manifest = report.manifest
    skipped = manifest.skipped
    for name in skipped[:10]:
        say(f"skipped: {name}")
    if len(skipped) > 10:
        say(f'... and {len(skipped) - 10} more; all of them stand in {target / "manifest.json"} under "skipped"')
    kept = f", {report.kept} kept from before" if report.kept else ""
    if report.seconds:
        say(f"{counted(report.written, 'shard')} written in {format_seconds(report.seconds)}{kept}: {target}")
    else:
        say(f"{target} was finished before, nothing is written; whether the source has changed since was not looked at")
    model = network_for(manifest.sample_shape) if manifest.pictures else "FILE.py:build"
    checked, trained = typed("inspect", target, "--verify"), typed("train", "--model", model, "--data", target)
    commentary.say(f"next: {checked}, or {trained}")


def _plan_document(job: Any) -> dict[str, Any]:
    return {
        "format": job.spec.format,
        "encoding": job.encoding,
        "sample_shape": list(job.sample_shape),
        "dtype": job.dtype,
        "num_classes": len(job.facts.class_names),
        "understood": list(job.facts.remarks),
        **({"fields": [dataclasses.asdict(item) for item in job.fields]} if not job.pictures else {}),
        "plan": dataclasses.asdict(job.plan),
    }


def _report_document(report: Any, target: Path) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "folder": str(target),
        "splits": {name: entry.num_samples for name, entry in manifest.splits.items()},
        "shards": len(manifest.shards()),
        "written": report.written,
        "kept": report.kept,
        "skipped": list(manifest.skipped),
        "seconds": report.seconds,
    }

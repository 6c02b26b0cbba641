"""`hpcdl shard | inspect`: make verified shards from any source, show the content of a data folder, and repair it."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.options import ConfigFlag, JsonFlag, QuietFlag, SetFlag, resolved, takes_settings
from hpcdl.cli.output import Commentary, print_json, print_table, put, say
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import quoted, typed
from hpcdl.core.processes.streams import caught
from hpcdl.core.protocols import Communicator
from hpcdl.core.units import counted, format_bytes, format_count, format_seconds, listed
from hpcdl.data.write.request import ShardConfig, ShardRequest
from hpcdl.models.table import network_for

if TYPE_CHECKING:
    from hpcdl.data.format.manifest import Manifest
    from hpcdl.data.show.inspection import Overview


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(name="shard", epilog="Example: hpcdl shard images shards --image-size 224 --split train=0.9,val=0.1")(
        shard
    )
    app.command(name="inspect", epilog="Example: hpcdl inspect shards --verify")(inspect)


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
    """Convert images, arrays, tables or records to HDF5 shards."""
    settings = resolved(ShardConfig, "shard", flags, config, pairs)
    request = ShardRequest(source=source, target=folder, config=settings.config, resume=resume, reader=reader)
    from hpcdl.data.write import writing

    commentary = Commentary(quiet=quiet)
    planned = functools.partial(_show_plan, print_line=commentary.say)
    if dry_run:
        job = writing.dry_run(request)
        _show_plan(job, print_line=say)
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
    _warn_of_leaks(folder)
    if json:
        print_json(_report_document(report, folder))
        return
    _show_report(report, folder, commentary)


def _ranks() -> Communicator | None:
    """Return the ranks of the launcher that started this process, or None without a launcher."""
    from hpcdl.cluster.environment import placement

    process = placement()
    if process is None or process.size == 1:
        return None
    from hpcdl.comm.mpi.communicator import world

    return world(process.size)


def _as_ctrl_c(number: int) -> None:
    """Treat a scheduler's SIGTERM and a closing terminal like Ctrl-C: complete shards stay for --resume."""
    raise KeyboardInterrupt


def _show_plan(job: Any, *, print_line: Callable[[str], None]) -> None:
    plan = job.plan
    shape = "x".join(str(side) for side in job.sample_shape)
    classes, size = format_count(len(job.facts.class_names)), format_bytes(plan.total_bytes)
    if job.spec.reader:
        print_line(f"reader: {job.spec.reader}, SHA-256 {job.spec.reader_digest}")
    if job.pictures:
        print_line(f"plan: {job.spec.format} -> {job.encoding} {shape} {job.dtype}, {classes} classes, {size}")
    else:
        print_line(f"plan: {job.spec.format} -> {len(job.fields)} fields, {size}")
        for field in job.fields:
            print_line(f"  {field.describe()}")
    for line in job.facts.remarks:
        print_line(f"  {line}")
    for name, count in plan.shards.items():
        print_line(f"  {name}: {counted(plan.num_samples[name], 'sample')} in {counted(count, 'shard')}")
    for reason in plan.reasons:
        print_line(f"  {reason}")


def _show_report(report: Any, target: Path, commentary: Commentary) -> None:
    manifest = report.manifest
    skipped = manifest.skipped
    for name in skipped[:10]:
        say(f"skipped: {name}")
    if len(skipped) > 10:
        say(f'... and {len(skipped) - 10} more; all of them stand in {target / "manifest.json"} under "skipped"')
    kept = f", {report.kept} kept from before" if report.kept else ""
    if report.seconds:
        say(f"{counted(report.written, 'shard')} written in {format_seconds(report.seconds)}{kept}: {quoted(target)}")
    else:
        unseen = "nothing is written; whether the source has changed since was not looked at"
        say(f"{quoted(target)} was finished before, {unseen}")
    commentary.say(f"next: {typed('inspect', target, '--verify')}, or {_use_of(target, manifest)}")


def _use_of(folder: Path, manifest: Manifest) -> str:
    """Return what may be typed about a data set that is sound."""
    from hpcdl.data.write.outputs import FORMAT

    if manifest.source.get("format") == FORMAT:
        return typed("report", folder)
    if manifest.untargeted:
        return f"{typed('docs', 'infer')} about the outputs of a trained model"
    return train_on(folder, manifest.sample_shape if manifest.pictures else None)


def train_on(data: Path | str, sample_shape: Sequence[int] | None, *options: object) -> str:
    """Return the command that trains on pictures of this shape; for other samples (None), where own networks are."""
    if sample_shape is None:
        return f"{typed('docs', 'own-model')} about a network of your own for these samples"
    return typed("train", "--model", network_for(sample_shape), "--data", data, *options)


def _plan_document(job: Any) -> dict[str, Any]:
    return {
        "format": job.spec.format,
        "encoding": job.encoding,
        "sample_shape": list(job.sample_shape),
        "dtype": job.dtype,
        "num_classes": len(job.facts.class_names),
        "understood": list(job.facts.remarks),
        **({"fields": [dataclasses.asdict(field) for field in job.fields]} if not job.pictures else {}),
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


_CLASSES_SHOWN = 20


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `hpcdl shard` made.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything: checksums fit, pictures decode.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Verify, and write damaged shards again.")] = False,
    source: Annotated[str | None, typer.Option("--from", metavar="SOURCE", help="What the data was made from.")] = None,
    reader: Annotated[
        str, typer.Option("--reader", metavar="FILE.py:NAME", help="Your own reader that made the data, to mend it.")
    ] = "",
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=0, help="Save N sample pictures as PNG.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Write a page: samples drawn, classes, ranges, twins.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where pictures and page go [DIR-samples, here].")
    ] = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show what a data folder holds; check and repair it."""
    from hpcdl.core.storage.disk import check_outputs, make_output_folder

    if repair != (source is not None):
        raise UsageError("--repair and --from belong together: hpcdl inspect DIR --repair --from SOURCE")
    if reader and not repair:
        raise UsageError("--reader is for --repair: hpcdl inspect DIR --repair --from SOURCE --reader FILE.py:NAME")
    commentary = Commentary(quiet=quiet)
    document: dict[str, Any] = {}
    if show:
        check_outputs([_page_path(folder, out)])
    if verify or repair:
        document.update(_check(folder, source, reader, commentary, keep=json))
    from hpcdl.data.format.manifest import read_manifest
    from hpcdl.data.show import inspection

    contents = inspection.inspect(folder)
    if contents.unknown_shards:
        say(
            f"warning: the manifest of {folder} does not name {listed(contents.unknown_shards)}: nobody reads such "
            "files. Are they of another data set? Move them away"
        )
    overview = inspection.look(folder) if show else None
    _warn_of_leaks(folder, overview)
    if out is not None and (samples or show):
        make_output_folder(out)
    if samples:
        document["pictures"] = _pictures(folder, samples, out or Path(f"{folder.name}-samples"))
    if overview is not None:
        document["page"] = _page(overview, _page_path(folder, out))
    if json:
        print_json({**dataclasses.asdict(contents), **document})
        return
    _show(contents)
    use = _use_of(folder, read_manifest(folder)[0]) if verify else typed("inspect", folder, "--verify")
    commentary.say(f"next: {use}")


def _warn_of_leaks(folder: Path, overview: Overview | None = None) -> None:
    from hpcdl.data.show.inspection import leaks

    for line in leaks(folder, overview):
        say(f"warning: {line}")


def _page_path(folder: Path, out: Path | None) -> Path:
    return (out or Path()) / f"{folder.resolve().name}-data.html"


def _check(folder: Path, source: str | None, reader: str, commentary: Commentary, *, keep: bool) -> dict[str, Any]:
    """Verify a folder, and repair it if a source is given. Raises CorruptError if damage remains."""
    from hpcdl.data.show import inspection

    done = 0
    with commentary.progress("verifying", inspection.bytes_to_verify(folder)) as bar:

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            bar.update(done, format_bytes(done))

        checked = inspection.verify(folder, on_bytes=on_bytes)
    repaired: list[str] = []
    if source is not None and checked.bad_shards:
        from hpcdl.data.write.repair import repair

        repaired = repair(folder, source, checked.bad_shards, reader)
        for name in repaired:
            say(f"written again: {name}")
        checked = inspection.verify(folder)
    damage = {
        "faults": list(checked.faults), "bad_shards": list(checked.bad_shards), "undecodable": list(checked.undecodable)
    }  # fmt: skip
    # With --json the damage is the result, although the next line raises.
    if keep and (checked.faults or checked.undecodable):
        print_json({"folder": str(folder), **damage})
    inspection.require_sound(folder, checked)
    decoded = f", and every picture of {format_count(checked.num_decoded)} decodes" if checked.num_decoded else ""
    say(f"sound: every checksum of {checked.num_shards} shards ({format_bytes(checked.num_bytes)}) fits{decoded}")
    return {"verified": True, **damage, "repaired": repaired}


def _page(overview: Overview, path: Path) -> str:
    """Write the page, and return its path."""
    from hpcdl.core.storage.files import write_output
    from hpcdl.data.show.page import page

    write_output(path, page(overview))
    say(f"page: {quoted(path)}")
    return str(path)


def _pictures(folder: Path, samples: int, out: Path) -> list[str]:
    from hpcdl.data.format.dataset import open_dataset
    from hpcdl.data.show.inspection import write_pictures

    dataset = open_dataset(str(folder))
    split = dataset.splits.get("train") or next(iter(dataset.splits.values()))
    written = write_pictures(dataset, split, samples, out)
    say(f"{len(written)} pictures of {split.name} in {out}")
    return [str(path) for path in written]


def _show(overview: Any) -> None:
    shape = "x".join(str(side) for side in overview.sample_shape)
    packed = f", {overview.compression}" if overview.compression else ""
    rows = [
        ("name", overview.name),
        ("source", overview.source_format),
        *([("reader", f"{overview.reader}, SHA-256 {overview.reader_sha256}")] if overview.reader else []),
        *(
            [("field", field.describe() + _scaling(field)) for field in overview.fields]
            or [("samples", f"{shape} {overview.dtype}, {overview.encoding}{packed}")]
        ),
        *[
            ("columns", f"{field.name}: {listed(field.columns, _CLASSES_SHOWN)}")
            for field in overview.fields
            if field.columns
        ],
        *[("words", _words(field.name, categories)) for field in overview.fields for categories in field.categories],
        *([("classes", format_count(overview.num_classes))] if overview.num_classes else []),
        *[("understood", line) for line in overview.understood],
        ("block", counted(overview.block_samples, "sample")),
        ("file system", overview.file_system),
        ("seed", str(overview.seed)),
        ("written by", f"hpcdl {overview.hpcdl_version}"),
    ]
    if overview.stripes:
        rows.insert(-2, ("stripes", f"{overview.stripes.count} OST(s) of {format_bytes(overview.stripes.size)}"))
    if overview.num_skipped:
        rows.append(("skipped", f"{overview.num_skipped} samples, named in the manifest"))
    print_table(("what", "value"), rows)
    put()
    print_table(
        ("split", "samples", "shards", "bytes"),
        [(s.name, format_count(s.num_samples), str(s.num_shards), format_bytes(s.num_bytes)) for s in overview.splits],
    )
    if not overview.splits[0].histogram:
        return
    put()
    names = list(overview.splits[0].histogram)[:_CLASSES_SHOWN]
    header = ("class", *(split.name for split in overview.splits))
    print_table(header, [(name, *(format_count(s.histogram[name]) for s in overview.splits)) for name in names])
    if overview.num_classes > _CLASSES_SHOWN:
        put(f"... and {overview.num_classes - _CLASSES_SHOWN} more classes; --json lists all")


def _scaling(field: Any) -> str:
    if field.statistics is None:
        return ""
    low, high = min(field.statistics.low), max(field.statistics.high)
    return f", {low:.4g} to {high:.4g}, scaled by {field.normalise}"


def _words(name: str, coded: Any) -> str:
    more = ", ..." if len(coded.words) > _CLASSES_SHOWN else ""
    listed = ", ".join(coded.words[:_CLASSES_SHOWN])
    return f"{coded.column} as {coded.coding}, from place {coded.place} of {name} on: {listed}{more}"

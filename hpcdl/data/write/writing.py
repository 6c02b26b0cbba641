"""`hpcdl shard` as a function: list the source, plan, write in parallel, write the manifest."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import Layer, load
from hpcdl.config.settings import settings_of
from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError, shown
from hpcdl.core.progress import Progress, progress
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.disk import make_folder, naming, private_folder, remove_file
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.storage.lock import writing
from hpcdl.core.units import format_rate
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import (
    FIELDS_SCHEMA,
    SCHEMA,
    Field,
    Manifest,
    Recipe,
    SplitEntry,
    read_manifest,
    write_manifest,
)
from hpcdl.data.format.manifest import FILE_NAME as MANIFEST_NAME
from hpcdl.data.sources.base.source import SourceSpec
from hpcdl.data.sources.base.splits import is_clutter, left_out
from hpcdl.data.sources.layouts.folders import inside_source
from hpcdl.data.sources.reader.source import user_reader
from hpcdl.data.write import journal
from hpcdl.data.write.listing import make_job, recipe_options
from hpcdl.data.write.plan import REPAIRED, WORK_NAME, ShardJob, read_job, shard_file
from hpcdl.data.write.request import LayoutConfig, ShardConfig, ShardRequest, SourceConfig, parse_split
from hpcdl.data.write.shards import ShardResult, scaled
from hpcdl.data.write.target import (
    check_reader,
    check_space,
    check_target,
    make_folders,
    missing_bytes,
    new_work_folder,
    no_space,
    prepare_splits,
    remove_work_folder,
    undoing,
)
from hpcdl.data.write.tasks import OTHERS_FROM_S, Task, WriterSettings, write_all

Results = dict[tuple[str, int], ShardResult]


class OtherRankFailed(HpcdlError):
    """Raised on ranks that exit silently, with the exit code of the rank whose error rank 0 reports."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """The result of a call: the shards `written` by it, those `kept` from an earlier call, and the manifest.

    `seconds` is 0 if an earlier call had done everything and nothing was read.
    """

    manifest: Manifest
    written: int
    kept: int
    seconds: float


def dry_run(request: ShardRequest) -> ShardJob:
    """List the source and plan; write nothing into the target."""
    check_target(request)
    with private_folder("hpcdl-") as work:
        job = make_job(request, work)
        _check_outside(request.target, job.spec)
        return _with_writers(job, request, len(job.tasks()), alone=True)


def _check_outside(target: Path, spec: SourceSpec) -> None:
    """Raise SourceError if the target, made by the real call, would be listed as a folder of the source."""
    location, inside = Path(spec.location).resolve(), target.resolve()
    if spec.format != "image-folder" or not inside.is_relative_to(location):
        return
    names = inside.relative_to(location).parts
    if not any(is_clutter(name) or left_out(name, spec.leave_out) for name in names):
        raise inside_source(str(target))


def shard(
    request: ShardRequest,
    *,
    communicator: Communicator | None = None,
    planned: Callable[[ShardJob], None] = lambda _: None,
    bar: bool = True,
) -> ShardReport:
    """Make the data folder of a request; `planned` is called with the plan before the first shard is written.

    With a communicator this is collective. Each rank writes its part; rank 0 lists, plans and writes the manifest.
    An error keeps whole shards for `--resume`; an error before the first shard leaves nothing behind.
    """
    solo = communicator is None or communicator.size == 1
    if solo or communicator is None:
        return _shard_solo(request, planned, bar=bar)
    return shard_with_ranks(request, communicator, planned, bar=bar)


def _shard_solo(request: ShardRequest, planned: Callable[[ShardJob], None], *, bar: bool) -> ShardReport:
    started = time.monotonic()
    if complete(request):
        manifest, _ = read_manifest(request.target)
        return ShardReport(manifest=manifest, written=0, kept=len(manifest.shards()), seconds=0.0)
    with preparing(request) as (job, done):
        planned(_with_writers(job, request, len(job.tasks()) - len(done), alone=True))
        todo = [task for task in job.tasks() if task not in done]
        total = sum(job.plan.num_samples.values())
        with progress("sharding", total, enabled=bar) as shown:
            on_samples = counter(shown, total - left(job, todo), started)
            try:
                results = write_part(request, job, todo, rank=0, alone=True, on_samples=on_samples)
            except KeyboardInterrupt:
                raise StoppedEarly(
                    "stopped; whole shards are kept, continue with the same command and --resume"
                ) from None
        manifest = finish(request, job, {**done, **results})
    return ShardReport(manifest=manifest, written=len(results), kept=len(done), seconds=time.monotonic() - started)


def complete(request: ShardRequest) -> bool:
    """Return whether `--resume` finds all work done. Raises UsageError if the target must not be written to."""
    check_target(request)
    done = request.resume and (request.target / MANIFEST_NAME).is_file()
    if done:
        manifest = read_manifest(request.target)[0]
        check_reader(request.target, manifest, request.reader)
        _check_made_so(request, manifest)
        _clear(request.target)
    return done


def _clear(target: Path) -> None:
    """Remove the work files, perhaps of all samples, left by a writer that was killed after writing the manifest."""
    leftovers = (target / WORK_NAME, target / LOCK_NAME, *journal.partial_manifests(target))
    # A finished folder may be read-only, or another user's: then they stay.
    if any(path.exists() for path in leftovers) and os.access(target, os.W_OK | os.X_OK):
        with writing(target):
            journal.remove(target)
            remove_work_folder(target)


def _check_made_so(request: ShardRequest, manifest: Manifest) -> None:
    """Raise UsageError if the finished data in the target comes from another source or other options."""
    name = Path(request.source).expanduser().absolute().name
    if name != manifest.name:
        raise UsageError(
            f"{request.target} holds a finished data set, made from {shown(manifest.name)} and not from "
            f"{request.source}; name another folder"
        )
    stored, requested = (_in_full(options) for options in (manifest.recipe.options, recipe_options(request.config)))
    # The recipe holds the format that was recognised.
    if requested["format"] == "auto":
        stored["format"] = "auto"
    key = next((key for key in sorted(stored) if stored[key] != requested[key]), None)
    if key is not None:
        was, new = (_option(key, recipe[key]) for recipe in (stored, requested))
        raise UsageError(
            f"{request.target} holds a finished data set, made {was} and not {new}; name another folder, or give what "
            "it was made with"
        )


def _option(key: str, value: Any) -> str:
    """Return an option of a recipe as messages show it."""
    if value is None or value is False:
        return f"without --{key}"
    if value is True:
        return f"with --{key}"
    listed = ("x" if key == "image-size" else ",").join(map(str, value)) if isinstance(value, list) else value
    return f"with --{key} {listed}"


def _in_full(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a recipe by key, including those that it omits or that are newer than it."""
    config = load(ShardConfig, [Layer(origin="manifest", values=dict(options))]).config
    in_full: dict[str, Any] = {
        setting.key: None for group in (SourceConfig, LayoutConfig) for setting in settings_of(group)
    }
    in_full |= recipe_options(config)
    if in_full["split"]:
        in_full["split"] = ",".join(
            f"{name}={share:g}" for name, share in sorted(parse_split(in_full["split"]).items())
        )
    return in_full


@contextmanager
def preparing(request: ShardRequest, *, alone: bool = True) -> Iterator[tuple[ShardJob, Results]]:
    """Hold the target's lock; yield the job, listed and planned in its work folder, and the shards already whole.

    `alone`: no other ranks share the cores.
    """
    target = request.target
    new_folders = make_folders(target)
    # In this order, so that the lock is gone when new folders are removed, which must be empty.
    with undoing(target, new_folders) as keep, writing(target):
        work = new_work_folder(target)
        try:
            request = _as_begun(request)
            with naming(work):
                job = make_job(request, work, alone=alone)
            entered = journal.entered(target, job.identity(), job.state)
            done = {**entered.done, **entered.before}
            check_space(target, job, len(job.tasks()) - len(done))
            if entered.before:
                job = _compared(request, job, entered.before, alone=alone)
        except BaseException:
            remove_work_folder(target)
            raise
        keep()
        prepare_splits(target, job)
        yield job, done


def _as_begun(request: ShardRequest) -> ShardRequest:
    """Return `request` with the split order of the first call: in another order the parts hold other samples."""
    requested, begun = request.config.layout.split, journal.begun_split(request.target)
    if not requested or not begun or parse_split(begun) != parse_split(requested):
        return request
    config = request.config
    layout = dataclasses.replace(config.layout, split=begun)
    return dataclasses.replace(request, config=dataclasses.replace(config, layout=layout))


def write_part(
    request: ShardRequest,
    job: ShardJob,
    tasks: list[Task],
    *,
    rank: int,
    alone: bool,
    on_samples: Callable[[int], None],
) -> Results:
    """Write these shards, and enter each in this rank's partial manifest; `alone`: no other ranks share the cores."""
    entries = _entries(request, job, rank)
    workers = _most_writers(request, len(tasks), alone=alone)
    results: Results = {}
    try:
        with (
            _full_disk_explained(job, request, lambda: len(tasks) - len(results)),
            closing(write_all(_writer_settings(request), tasks, left(job, tasks), workers, on_samples)) as written,
        ):
            for result in written:
                # On disk before it counts: what is not entered is written again by --resume.
                entries.enter(result)
                results[result.split, result.number] = result
    finally:
        entries.close()
    return results


def _entries(request: ShardRequest, job: ShardJob, rank: int) -> journal.PartialManifest:
    return journal.PartialManifest(request.target, rank, job.identity(), job.state, job.options.get("split", ""))


def _writer_settings(request: ShardRequest, *, again: bool = False) -> WriterSettings:
    code = user_reader(request.reader).digest if request.reader else ""
    return WriterSettings(target=request.target, code=code, again=again)


@contextmanager
def _full_disk_explained(job: ShardJob, request: ShardRequest, num_left: Callable[[], int]) -> Iterator[None]:
    """Replace the OSError of a full disk by an error that says how much space the remaining shards need."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        missing, quota = missing_bytes(job, num_left()), error.errno == errno.EDQUOT
        raise no_space(request.target, missing, at_most=job.compression is not None, quota=quota) from error


def _compared(request: ShardRequest, job: ShardJob, before: Results, *, alone: bool) -> ShardJob:
    """Compare the shards `before` with a source whose files have changed; return the job with a remark in its plan.

    Each shard is made again below the work folder: a copy of the source gives the same bytes. Raises UsageError if one
    differs. Equal shards are entered as made from the source as it is now.
    """
    tasks, work = list(before), request.target / WORK_NAME
    for split in {split for split, _ in tasks}:
        make_folder((work / REPAIRED / shard_file(split, 0, UNSPLIT)).parent)
    entries, total = _entries(request, job, 0), left(job, tasks)
    workers, settings = _most_writers(request, len(tasks), alone=alone), _writer_settings(request, again=True)
    try:
        with (
            progress("comparing whole shards with the source", total) as shown,
            _full_disk_explained(job, request, lambda: 1),
            closing(write_all(settings, tasks, total, workers, counter(shown, 0, time.monotonic()))) as written,
        ):
            for result in written:
                was = before[result.split, result.number]
                if result.entry != was.entry or list(result.skipped) != list(was.skipped):
                    name = shard_file(result.split, result.number, UNSPLIT)
                    raise UsageError(
                        f"{request.target} was begun from this source before its files changed ({name} comes out "
                        "otherwise now): its shards would be half old, half new. Remove that folder, or name another "
                        "one, and shard again"
                    )
                if result.entry is not None:
                    remove_file(work / REPAIRED / result.entry.file)
                entries.enter(result)
    finally:
        entries.close()
    remark = f"the source's files are others than before (time, inode), and hold the same: {len(tasks)} shards compared"
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, reasons=[*job.plan.reasons, remark]))


def finish(request: ShardRequest, job: ShardJob, results: Results) -> Manifest:
    """Write the manifest and remove the work files."""
    splits, skipped = {}, list(job.facts.skipped)
    for split, count in job.plan.shards.items():
        of_split = [results[split, number] for number in range(count)]
        shards = [result.entry for result in of_split if result.entry is not None]
        skipped += [name for result in of_split for name in result.skipped]
        if not shards:
            raise HpcdlError(f"not one sample of {split} can be read; look at the source, first {skipped[0]}")
        splits[split] = SplitEntry(num_samples=sum(entry.num_samples for entry in shards), shards=shards)
    fields = scaled(job.fields, [results[task].moments for task in job.tasks() if task[0] == _training_split(job)])
    classes = list(job.facts.class_names) if _gives_classes(fields) else []
    manifest = Manifest(
        schema=SCHEMA if job.pictures else FIELDS_SCHEMA,
        hpcdl_version=job.version,
        name=job.name,
        source={"format": job.spec.format, "name": job.source_name, **_reader_record(job)},
        seed=job.seed,
        encoding=job.encoding,
        compression=job.compression,
        sample_shape=list(job.sample_shape),
        dtype=job.dtype,
        num_classes=len(classes),
        class_names=classes,
        block_samples=job.plan.block_samples,
        splits=splits,
        skipped=skipped,
        recipe=Recipe(
            options={**job.options, "format": job.spec.format},
            num_samples=dict(job.plan.num_samples),
            shards=dict(job.plan.shards),
            alignment=job.plan.alignment,
            fingerprint=job.fingerprint,
            sample_checksums=job.sample_checksums,
            memory_bytes=job.plan.memory_bytes,
        ),
        fields=fields,
        understood=list(job.facts.remarks),
    )
    # First, then the removals: a kill in between leaves a finished folder, whose remains `_clear` removes.
    write_manifest(request.target, manifest)
    journal.remove(request.target)
    remove_work_folder(request.target)
    return manifest


def _reader_record(job: ShardJob) -> dict[str, str]:
    """Return the user's reader as the manifest names it: by the last part of its path."""
    if not job.spec.reader:
        return {}
    return {"reader": job.spec.reader.rpartition("/")[2], "reader_sha256": job.spec.reader_digest}


def _training_split(job: ShardJob) -> str:
    """Return the split whose samples give the statistics."""
    return "train" if "train" in job.plan.shards else next(iter(job.plan.shards))


def _gives_classes(fields: Sequence[Field]) -> bool:
    """Return whether exactly one of the targets names classes."""
    return sum(field.role == "target" and field.kind == "class" for field in fields) == 1


def _most_writers(request: ShardRequest, num_tasks: int, *, alone: bool) -> int:
    """Return the most processes that write `num_tasks` shards; `alone`: no other ranks share the cores."""
    return max(1, min(request.most_processes(alone=alone), num_tasks))


def _with_writers(job: ShardJob, request: ShardRequest, num_tasks: int, *, alone: bool) -> ShardJob:
    """Return the job with a plan that also says how many processes write; `alone`: this is not one of many ranks."""
    most = _most_writers(request, num_tasks, alone=alone)
    line = "one process writes"
    if most > 1:
        line += f", and up to {most} as soon as the rest would take it more than {OTHERS_FROM_S:g} s"
    plan = dataclasses.replace(job.plan, reasons=[*job.plan.reasons, ("" if alone else "in each rank ") + line])
    return dataclasses.replace(job, plan=plan)


def left(job: ShardJob, tasks: list[Task]) -> int:
    """Return the number of samples in the shards `tasks`."""
    return sum(stop - first for first, stop in (job.plan.shard_samples(*task) for task in tasks))


def counter(shown: Progress, kept: int, started: float) -> Callable[[int], None]:
    """Return a function that adds up samples from `kept` for a bar; the rate counts from `started` (time.monotonic)."""
    count = 0

    def on_samples(samples: int) -> None:
        nonlocal count
        count += samples
        shown.update(kept + count, format_rate(count / max(1e-9, time.monotonic() - started), "samples"))

    return on_samples


def shard_with_ranks(
    request: ShardRequest, communicator: Communicator, planned: Callable[[ShardJob], None], *, bar: bool
) -> ShardReport:
    """Make the data folder of a request; collective. Rank 0 raises the error, the other ranks OtherRankFailed."""
    started = time.monotonic()
    with ExitStack() as stack:
        job, done = _begin(request, communicator, planned, stack)
        if job is None:
            manifest, _ = read_manifest(request.target)
            return ShardReport(manifest=manifest, written=0, kept=len(manifest.shards()), seconds=0.0)
        # Ranks take turns, so that each has part of every split.
        todo = [task for task in job.tasks() if task not in done][communicator.rank :: communicator.size]
        total = left(job, todo)
        first = communicator.rank == 0
        results: Results = {}
        with progress("sharding (this rank's part)", total, enabled=bar and first) as shown:
            problem = None
            try:
                on_samples = counter(shown, 0, started)
                results = write_part(request, job, todo, rank=communicator.rank, alone=False, on_samples=on_samples)
            # Kept until the gather below, in which the other ranks wait.
            except (HpcdlError, OSError, KeyboardInterrupt) as error:
                problem = error
        answers = communicator.allgather_json(_answer(problem, results))
        _raise_first(answers, communicator.rank)
        for answer in answers:
            for document in answer["results"]:
                result = from_json(ShardResult, document)
                done[result.split, result.number] = result
        if first:
            finish(request, job, done)
        communicator.barrier()  # nobody reads the manifest before it is written
    manifest, _ = read_manifest(request.target)
    written = sum(len(answer["results"]) for answer in answers)
    return ShardReport(manifest=manifest, written=written, kept=len(done) - written, seconds=time.monotonic() - started)


def _begin(
    request: ShardRequest, communicator: Communicator, planned: Callable[[ShardJob], None], stack: ExitStack
) -> tuple[ShardJob | None, Results]:
    """Return the job and the whole shards, on every rank; no job if all is done."""
    answer: dict[str, Any] = {"exit_code": 0, "message": "", "complete": False, "done": []}
    job: ShardJob | None = None
    done: Results = {}
    problem: HpcdlError | None = None
    if communicator.rank == 0:
        try:
            if complete(request):
                answer["complete"] = True
            else:
                # On the caller's stack: rank 0 holds lock and work folder until all ranks have written.
                job, done = stack.enter_context(preparing(request, alone=False))
                of_a_rank = -(-(len(job.tasks()) - len(done)) // communicator.size)
                planned(_with_writers(job, request, of_a_rank, alone=False))
                answer["done"] = [dataclasses.asdict(result) for result in done.values()]
        except HpcdlError as error:
            problem = error
            answer["exit_code"] = error.exit_code
    # Rank 0 takes part even with a problem: the others wait here for its answer.
    answer = communicator.allgather_json(answer)[0]
    if problem is not None:
        raise problem
    if answer["exit_code"]:
        raise OtherRankFailed(answer["exit_code"])
    if answer["complete"]:
        return None, {}
    if job is None:
        job = read_job(request.target / WORK_NAME)
        results = [from_json(ShardResult, document) for document in answer["done"]]
        done = {(result.split, result.number): result for result in results}
    return job, done


def _answer(problem: BaseException | None, results: Results) -> dict[str, Any]:
    if problem is None:
        return {"exit_code": 0, "message": "", "results": [dataclasses.asdict(result) for result in results.values()]}
    if isinstance(problem, KeyboardInterrupt):
        problem = StoppedEarly("stopped; continue with the same command and --resume")
    return {"exit_code": getattr(problem, "exit_code", 1), "message": str(problem), "results": []}


def _raise_first(answers: list[dict[str, Any]], rank: int) -> None:
    """Raise the first problem of any rank on rank 0; the other ranks exit silently."""
    for number, answer in enumerate(answers):
        if answer["exit_code"]:
            if rank:
                raise OtherRankFailed(answer["exit_code"])
            error = HpcdlError(f"rank {number}: {answer['message']}")
            error.exit_code = answer["exit_code"]
            raise error

"""`hpcdl inspect --repair`: write damaged shards again from their source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcdl.config.load import Layer, load
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.storage.disk import move_over
from hpcdl.core.storage.lock import writing
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import Manifest, read_manifest
from hpcdl.data.sources.base.source import Index, open_source
from hpcdl.data.write.listing import make_job
from hpcdl.data.write.plan import REPAIRED, WORK_NAME, ShardJob, shard_file
from hpcdl.data.write.request import ShardConfig, ShardRequest
from hpcdl.data.write.shards import ShardWriter
from hpcdl.data.write.target import check_reader, new_work_folder, remove_work_folder


def repair(folder: Path, source: str, bad_shards: Sequence[str], reader: str = "") -> list[str]:
    """Write the shards `bad_shards` again from `source`; return the files written.

    Raises UsageError and replaces nothing if the data was made from another source or another `reader`. The reader
    named in the manifest never runs unless the user names it too.
    """
    manifest, _ = read_manifest(folder)
    check_reader(folder, manifest, reader)
    if not bad_shards:
        return []
    with writing(folder):
        work = new_work_folder(folder)
        try:
            return list(_rewritten(folder, manifest, _job(folder, source, manifest, work, reader), set(bad_shards)))
        finally:
            remove_work_folder(folder)


def _job(folder: Path, source: str, manifest: Manifest, work: Path, reader: str) -> ShardJob:
    """Return the job that made the folder, with the source at its present location."""
    recipe = manifest.recipe
    layers = [
        Layer(origin="manifest", values=recipe.options),
        # What was left out then must be left out again, or the shard would differ.
        Layer(origin="manifest", values={"on-error": "skip" if manifest.skipped else "stop"}),
        # The words of the folder itself: the folder that supplied them may be gone.
        Layer(origin="manifest", values={"categories-of": str(folder)} if recipe.options.get("categories") else {}),
    ]
    request = ShardRequest(source=source, target=folder, config=load(ShardConfig, layers).config, reader=reader)
    job = make_job(request, work, asks=False)
    if job.fingerprint != recipe.fingerprint:
        raise UsageError(
            f"{source} is not what {folder} was made from: names, sizes or labels of its samples differ; if an "
            "earlier hpcdl numbered its labels otherwise, shard it into another folder"
        )
    plan = dataclasses.replace(
        job.plan,
        num_samples=recipe.num_samples,
        shards=recipe.shards,
        alignment=recipe.alignment,
        block_samples=manifest.block_samples,
    )
    return dataclasses.replace(
        job,
        name=manifest.name,
        source_name=manifest.source["name"],
        plan=plan,
        sample_checksums=recipe.sample_checksums,
        version=manifest.hpcdl_version,
    )


def _rewritten(folder: Path, manifest: Manifest, job: ShardJob, bad: set[str]) -> Iterator[str]:
    entries = {entry.file: entry for entry in manifest.shards()}
    again = folder / WORK_NAME / REPAIRED
    writer = ShardWriter(again, job, open_source(job.spec), Index(folder / WORK_NAME))
    for split, number in job.tasks():
        name = shard_file(split, number, UNSPLIT)
        if name not in bad:
            continue
        rewritten = again / name
        rewritten.parent.mkdir(parents=True, exist_ok=True)
        result = writer.write(split, number)
        # The entry holds the checksum of the frame, which holds those of all blocks.
        if result.entry != entries[name]:
            raise HpcdlError(f"{name} made from this source is not what it was: the content of the source has changed")
        move_over(rewritten, folder / name)
        yield name

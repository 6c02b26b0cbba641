"""The partial manifest, in which each finished shard is entered; and the state of the source's files.

Every rank has its own file, `manifest.partial.RANK`. A line cut short by a crash counts as absent. A line with only
`source` gives the state of the source from which the following shards were made, or with which they were compared.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.disk import cut, open_to_append, remove_file, sync_folder
from hpcdl.core.storage.files import parse_json, read_bytes
from hpcdl.data.format.dataset import PARTIAL_PREFIX
from hpcdl.data.sources.base.source import FILES_LISTED, SourceFacts, SourceSpec
from hpcdl.data.write.shards import ShardResult

_NAME = re.compile(re.escape(PARTIAL_PREFIX) + r"\.\d{5,}")
_BEGIN = b'{"identity": '


def partial_manifests(folder: Path) -> list[Path]:
    """Return the partial manifests in a folder, sorted; UsageError if a file of such a name is not hpcdl's."""
    paths = sorted(path for path in folder.glob(f"{PARTIAL_PREFIX}.*") if _NAME.fullmatch(path.name))
    for path in paths:
        # This way round, because a crash may have cut even the first line.
        if not _BEGIN.startswith(_content(path)[: len(_BEGIN)]):
            raise UsageError(f"{path} is not a file of hpcdl, which uses this name; move it away")
    return paths


class PartialManifest:
    """Appends to the partial manifest of one rank."""

    def __init__(self, folder: Path, rank: int, identity: str, state: str, split: str = "") -> None:
        path = folder / f"{PARTIAL_PREFIX}.{rank:05d}"
        self._descriptor = open_to_append(path)
        content = path.read_bytes()
        whole_bytes = content.rfind(b"\n") + 1
        cut(self._descriptor, whole_bytes)  # a line that a crash cut short would spoil the next one
        if whole_bytes == 0:
            self._append({"identity": identity, "source": state} | ({"split": split} if split else {}))
            sync_folder(folder)  # the file's name must survive a crash too
        elif [document["source"] for document in _documents(path) if "source" in document][-1:] != [state]:
            self._append({"source": state})

    def enter(self, result: ShardResult) -> None:
        """Enter a finished shard."""
        self._append(dataclasses.asdict(result))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _append(self, document: object) -> None:
        content = json.dumps(document).encode() + b"\n"
        while content:
            content = content[os.write(self._descriptor, content) :]
        # Only then is the shard's entry sure to outlive a crash of the node.
        os.fsync(self._descriptor)


@dataclass(frozen=True, kw_only=True)
class Entered:
    """Whole shards: `done` are made from the source as it is, `before` from its files in another state."""

    done: dict[tuple[str, int], ShardResult]
    before: dict[tuple[str, int], ShardResult]


def entered(folder: Path, identity: str, state: str) -> Entered:
    """Return the shards that the partial manifests of `folder` list and that exist in full size.

    Raises UsageError if they belong to another job: another source or other options.
    """
    entered_shards = Entered(done={}, before={})
    for path in partial_manifests(folder):
        documents = list(_documents(path))
        if documents:
            _check_identity(folder, str(documents[0].get("identity")), identity)
        results = entered_shards.before
        for document in documents:
            if "source" in document:
                results = entered_shards.done if document["source"] == state else entered_shards.before
                continue
            try:
                result = from_json(ShardResult, document)
            except (TypeError, ValueError) as error:
                raise CorruptError(f"{path} is damaged ({error}); remove it, and the command writes again") from error
            if result.entry is None or _is_whole(folder / result.entry.file, result.entry.num_bytes):
                results[result.split, result.number] = result
    for task in entered_shards.done:
        # It was compared since, and entered again as made from the present source.
        entered_shards.before.pop(task, None)
    return entered_shards


def begun_split(folder: Path) -> str:
    """Return the --split with which the work in a folder began; empty if none is recorded."""
    documents = (next(_documents(path), {}) for path in partial_manifests(folder))
    return next((str(document["split"]) for document in documents if "split" in document), "")


def _check_identity(folder: Path, begun: str, identity: str) -> None:
    """Raise UsageError unless the identity `begun` is that of this job."""
    if begun == identity:
        return
    reader = begun.partition("-")[2]
    if reader != identity.partition("-")[2]:
        raise UsageError(
            f"{folder} was begun with another reader, or before its file changed; "
            "give the earlier version of the reader, or another target folder"
        )
    about_items = ", or items() now gives another list (sort what a folder's listing gives)" if reader else ""
    raise UsageError(
        f"{folder} was begun with other options, another source or another hpcdl{about_items}; "
        "give the same as then, or another target folder"
    )


def remove(folder: Path) -> None:
    """Remove the partial manifests after the manifest has replaced them."""
    for path in partial_manifests(folder):
        remove_file(path)


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise CorruptError(f"cannot read {path} ({error.strerror}); remove it, and the command writes again") from error


def _documents(path: Path) -> Iterator[dict[str, object]]:
    for line in _content(path).splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        try:
            document = parse_json(line)
        except ValueError:
            return
        if not isinstance(document, dict):
            return
        yield document


def _is_whole(path: Path, num_bytes: int) -> bool:
    try:
        return path.is_file() and path.stat().st_size == num_bytes
    except (OSError, ValueError):  # not a valid file name
        return False


_BESIDE = {".npy": (".npy",), ".txt": (".txt", ".labels"), ".csv": (), ".tsv": ()}
"""Endings of files that may belong to a single file with this ending and are stored beside it."""


def source_state(spec: SourceSpec, facts: SourceFacts, listed: str) -> str:
    """Return a checksum of the state of all files that samples come from; `listed` is the state of the rows."""
    digest = xxhash.xxh3_64(listed.encode())
    location, work = Path(spec.location), Path(spec.work)
    if spec.format in ("synthetic", "reader"):  # for a reader's samples the list holds the checksums
        return digest.hexdigest()
    # Sorted, because a folder lists its files in any order.
    for path in sorted({*_own(location, spec.format), *_named(facts, work)}):
        stat = path.stat()
        # Relative, because a source that was moved as a whole is the same one.
        name = os.fsencode(path.relative_to(location) if path.is_relative_to(location) else path.name)
        # With the inode: a file of the same size and time may have been moved into its place (mv, rsync -t).
        digest.update(b"%b\0%d %d %d\0" % (name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return digest.hexdigest()


def _own(location: Path, name: str) -> Iterator[Path]:
    if location.is_file():
        yield location
        for suffix in _BESIDE.get(location.suffix.lower(), ()):
            yield from (path for path in location.parent.glob(f"*{suffix}") if path.is_file())
    elif name not in FILES_LISTED:
        for base, _, names in os.walk(location, followlinks=True):
            yield from (path for file_name in names if (path := Path(base) / file_name).is_file())


def _named(facts: SourceFacts, work: Path) -> Iterator[Path]:
    """Yield the files that samples are read from, except those unpacked for the writing."""
    kept = (
        *(array.file for array in facts.arrays),
        # Some sources keep what a file holds before its name, which may hold colons itself.
        *(kept[kept.find(":/") + 1 :] if not kept.startswith("/") else kept for kept in facts.files),
        *facts.linked,
    )
    for name in kept:
        path = Path(name)
        if path.is_absolute() and work not in path.parents and path.is_file():
            yield path

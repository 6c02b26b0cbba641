"""The manifest under way: each shard is entered once it is whole, one line of JSON, fsynced.

Every rank has a file of its own, `manifest.partial.RANK`. A line that a crash cut short counts as absent.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from hpcdl.core.disk import cut, open_to_append, remove_file, sync_folder
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.files import parse_json, read_bytes
from hpcdl.core.records import from_json
from hpcdl.data.format.dataset import PARTIAL_PREFIX
from hpcdl.data.write.shards import ShardResult


class PartialManifest:
    """Appends to the partial manifest of one rank."""

    def __init__(self, folder: Path, rank: int, identity: str, state: str) -> None:
        path = folder / f"{PARTIAL_PREFIX}.{rank:05d}"
        self._descriptor = open_to_append(path)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        cut(self._descriptor, whole)
        if whole == 0:
            self._append({"identity": identity, "source": state})
            sync_folder(folder)

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
        os.fsync(self._descriptor)


def entered(folder: Path, identity: str, state: str) -> dict[tuple[str, int], ShardResult]:
    """The shards that all partial manifests of `folder` hold and that are there in full size.

    UsageError where they belong to another job: another source or other options, or the same source before a change.
    """
    found = {}
    for path in sorted(folder.glob(f"{PARTIAL_PREFIX}.*")):
        documents = list(_documents(path))
        if documents and documents[0].get("identity") != identity:
            began = str(documents[0].get("identity")).partition("-")[2]
            if began != identity.partition("-")[2]:
                raise UsageError(
                    f"{folder} was begun with another reader, or before its file changed; "
                    "give the reader as it was then, or another target folder"
                )
            listed = ", or items() now gives another list (sort what a folder's listing gives)" if began else ""
            raise UsageError(
                f"{folder} was begun with other options, another source or another hpcdl{listed}; "
                "give the same as then, or another target folder"
            )
        if documents and documents[0].get("source") != state:
            raise UsageError(
                f"{folder} was begun from this source before its files changed (size, time or inode): its shards would "
                "be half old, half new. Remove that folder, or name another one, and shard anew"
            )
        for document in documents[1:]:
            try:
                result = from_json(ShardResult, document)
            except (TypeError, ValueError) as error:
                raise CorruptError(f"{path} is damaged ({error}); remove it, and the command writes again") from error
            if result.entry is None or _is_whole(folder / result.entry.file, result.entry.num_bytes):
                found[result.split, result.number] = result
    return found


def remove(folder: Path) -> None:
    """Remove the partial manifests: the manifest has taken their place."""
    for path in folder.glob(f"{PARTIAL_PREFIX}.*"):
        remove_file(path)


def _documents(path: Path) -> Iterator[dict[str, object]]:
    try:
        content = read_bytes(path)
    except OSError as error:
        raise CorruptError(f"cannot read {path} ({error.strerror}); remove it, and the command writes again") from error
    for line in content.splitlines(keepends=True):
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
    except (OSError, ValueError):  # no name that a file can have
        return False

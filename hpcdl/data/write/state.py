"""What the files of a source are at one moment: size, time of change and inode, so that another moment is noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from hpcdl.data.sources.base.source import FILES_LISTED, SourceFacts, SourceSpec

_BESIDE = {".npy": (".npy",), ".txt": (".txt", ".labels"), ".csv": (), ".tsv": ()}
"""Endings of files that may belong to a single file of this ending, and lie beside it."""


def source_state(spec: SourceSpec, facts: SourceFacts, listed: str) -> str:
    """A checksum of the state of all files that the samples come from; `listed` is that of the rows."""
    digest = xxhash.xxh3_64(listed.encode())
    location, work = Path(spec.location), Path(spec.work)
    if spec.format in ("synthetic", "reader"):  # of a reader's samples the list holds the checksums
        return digest.hexdigest()
    for path in sorted({*_own(location, spec.format), *_named(facts, work)}):
        found = path.stat()
        name = os.fsencode(path.relative_to(location) if path.is_relative_to(location) else path.name)
        digest.update(b"%b\0%d %d %d\0" % (name, found.st_size, found.st_mtime_ns, found.st_ino))
    return digest.hexdigest()


def _own(location: Path, name: str) -> Iterator[Path]:
    if location.is_file():
        yield location
        for ending in _BESIDE.get(location.suffix.lower(), ()):
            yield from (path for path in location.parent.glob(f"*{ending}") if path.is_file())
    elif name not in FILES_LISTED:
        for base, _, names in os.walk(location, followlinks=True):
            yield from (path for one in names if (path := Path(base) / one).is_file())


def _named(facts: SourceFacts, work: Path) -> Iterator[Path]:
    """Files that samples are read from, but those that were unpacked for the writing."""
    kept = (*(place.file for place in facts.arrays), *(kept.rpartition(":")[2] for kept in facts.files), *facts.linked)
    for name in kept:
        path = Path(name)
        if path.is_absolute() and work not in path.parents and path.is_file():
            yield path

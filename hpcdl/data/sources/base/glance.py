"""Looks into folders that cost one listing, and no stat for each file: what is there, and are images below?"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from hpcdl.data.sources.base.foreign import IMAGE_ENDINGS

_LOOKED_INTO = 16


def files_of(folder: Path) -> list[Path]:
    """The files in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(folder / entry.name for entry in entries if entry.is_file())


def folders_of(folder: Path) -> list[Path]:
    """The folders in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(folder / entry.name for entry in entries if entry.is_dir())


def has_folders_of_images(folder: Path, levels: int = 2) -> bool:
    """Whether a folder below (or one below that) holds image files, as far as its first entries tell."""
    with os.scandir(folder) as entries:
        first = list(itertools.islice((entry for entry in entries if entry.is_dir()), _LOOKED_INTO))
    for entry in first:
        with os.scandir(entry.path) as entries:
            inside = list(itertools.islice(entries, _LOOKED_INTO))
        if any(own.is_file() and own.name.lower().endswith(IMAGE_ENDINGS) for own in inside):
            return True
        if levels > 1 and has_folders_of_images(Path(entry.path), levels - 1):
            return True
    return False

"""The user's own code of a run: its files are found without running them, and known again by their digests."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpcdl.core.storage.files import read_bytes

_LIBRARIES = ("site-packages", "dist-packages")
_MOST_FILES = 300
"""Most files that are read: what imports more holds a library, and takes long to look through at every start."""


def digests(sources: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of `sources`, files or modules of Python, and of the user's own files that these import.

    Of many files those nearest to `sources`.
    """
    files = {source: file for source in sources if (file := _file_of(source)).is_file()}
    own = [Path(entry) for entry in sys.path if entry and not _is_library(Path(entry))]
    known, waiting = {file.absolute() for file in files.values()}, [*files.values()]
    for file in waiting:  # grows by what each file imports
        new = [path for path in dict.fromkeys(_imported_by(file, own)) if path not in known]
        waiting += new[: max(0, _MOST_FILES - len(waiting))]
        known.update(new)
    files |= {str(file): file for file in waiting[len(files) :]}
    return {source: hashlib.sha256(read_bytes(file)).hexdigest() for source, file in files.items()}


def _file_of(source: str) -> Path:
    """Return the file of Python; a module's is searched without an import, which would run the user's code."""
    if source.endswith(".py") or not all(part.isidentifier() for part in source.split(".")):
        return Path(source).expanduser()
    *folders, name = source.split(".")
    found = (Path(entry, *folders, end) for entry in sys.path for end in (f"{name}.py", f"{name}/__init__.py"))
    return next((path for path in found if path.is_file()), Path(source))


def _imported_by(file: Path, own: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that `file` imports from its own folder, its package, or `own` folders, absolute."""
    try:
        tree = ast.parse(read_bytes(file))
    except (SyntaxError, ValueError, RecursionError, OSError):  # Python itself will say what is wrong
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # What follows `import` may be a module as well as a name.
            names = [(node.level, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names]
        else:
            continue
        for level, name in names:
            # Level 0 and level 1 both mean the file's own folder: one dot is the package that holds the file.
            above = [file.absolute().parent, *file.absolute().parents]
            folders = above[level : level + 1] if level else [above[0], *own]
            yield from _files_of(name.split("."), folders)


def _files_of(parts: list[str], folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the files of a dotted name, packages first, in the first folder that has any."""
    if parts[0] in sys.stdlib_module_names or parts[0] == "hpcdl":
        return
    for folder in folders:
        bases = [folder.joinpath(*parts[:number]) for number in range(1, len(parts) + 1)]
        paths = [path for base in bases for path in (base / "__init__.py", base.parent / f"{base.name}.py")]
        if found := [path for path in paths if path.is_file()]:
            yield from found
            return


def _is_library(folder: Path) -> bool:
    """Return whether a folder holds installed packages, such as those that a site's modules put on PYTHONPATH."""
    prefixes = (sys.prefix, sys.base_prefix)
    installed = any(part in _LIBRARIES for part in folder.parts) or any(map(folder.is_relative_to, prefixes))
    return installed or any(folder.glob("*.dist-info"))

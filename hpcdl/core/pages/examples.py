"""The files for trying things out that come with hpcdl: what there is, and a copy of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.paths import share_folder
from hpcdl.core.storage import disk

_COMPILED = "__pycache__"
"""What Python leaves beside an example that was run where it lies."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A file, or a folder of files, with one line on what it is."""

    name: str
    summary: str


def list_examples() -> list[Example]:
    """What there is, by name; the page of a folder, NAME.md, comes with it and is no example itself."""
    found = sorted(path for path in _folder().iterdir() if path.suffix != ".md" and path.name != _COMPILED)
    return [Example(name=path.name, summary=_summary(path)) for path in found]


def copy_examples(names: Sequence[str], folder: Path) -> list[Path]:
    """Copy examples into `folder` and return where each is; files that are there with the same content stay.

    UnknownNameError for what there is not, UsageError where a file is there with other content: then none is copied.
    """
    known = [item.name for item in list_examples()]
    for name in names:
        if name not in known:
            raise UnknownNameError("example", name, known)
    pairs = [pair for name in names for pair in _pairs(_folder() / name, folder)]
    for path, target in pairs:
        if target.is_dir() or (target.exists() and target.read_bytes() != path.read_bytes()):
            raise UsageError(f"{target} exists and differs from the example; choose another folder with --to DIR")
    for path, target in pairs:
        disk.make_folder(target.parent)
        if not target.exists():
            disk.create(target, path.read_bytes())
    return [folder / name for name in names]


def _pairs(source: Path, folder: Path) -> list[tuple[Path, Path]]:
    """Each file of an example and where its copy goes."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    files = [path for path in files if path.parent.name != _COMPILED]
    return [(path, folder / path.relative_to(source.parent)) for path in files]


def _folder() -> Path:
    return share_folder() / "examples"


def _summary(path: Path) -> str:
    """The first sentence of a file's docstring, comment or page."""
    text = (path.with_suffix(".md") if path.is_dir() else path).read_text().splitlines()[0]
    return text.strip('#" ').split(". ")[0].split(": hpcdl")[0].rstrip(".").replace("`", "")

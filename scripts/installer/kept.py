"""Separate the files that `make install` put into a tree from those of the site, and keep the latter."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from modulefile import is_of_this_prefix, modulefile_text
from plan import CHECKOUT, Plan

from hpcdl.core.storage.disk import create, free_name, is_marked, keep_others, make_folder, move, paths_in

MARKER = ".hpcdl-unfinished"
"""File in a tree under construction that names its builder."""
RECEIPT = "install.json"
"""File in a complete tree that describes it."""
LIST = "installed.json"
"""Beside the receipt: the digest of each installed file, by its path, and of the modulefile."""
SCRATCH = ".scratch-"
"""Prefix of the folder for temporary files in an unfinished tree; earlier versions used .scratch."""
_ALWAYS = re.compile(rf"{re.escape(MARKER)}|{RECEIPT}|{LIST}|(?:.*/)?__pycache__/[^/]+\.pyc(?:\.\d+)?")
_MADE = re.compile(
    r"bin/(?:hpcdl(?:-python)?|python|mpiexec)|share/hpcdl/docs/html/.+|share/man/man1/hpcdl[\w-]*\.1|share/completions/(?:hpcdl\.bash|_hpcdl|hpcdl\.fish)|venv/.+"
)
_COPIED = {
    "share/hpcdl/docs/": CHECKOUT / "docs",
    "share/hpcdl/": CHECKOUT / "share" / "hpcdl",
}


def write_list(plan: Plan) -> None:
    """Write the list of files that this installation has put into its tree."""
    files = {name: _digest(plan.tree, name) for name in paths_in(plan.tree) if _would_put(name)}
    listed = {"files": files, "modulefile": _digest_of(modulefile_text(plan).encode())}
    create(plan.tree / LIST, json.dumps(listed, indent=0).encode())


def keep(plan: Plan, tree: Path, modulefile: Path) -> None:
    """Move files that the site added to `tree`, or changed there, to PREFIX/<version>.kept; print one line about it."""
    kept = plan.prefix / f"{plan.version}.kept"
    if os.path.lexists(kept):
        kept = free_name(kept)
    files, digest = _listed(tree)
    moved = keep_others(tree, kept, _known_in(tree, files))
    if digest and is_of_this_prefix(plan, modulefile) and _digest_of(modulefile.read_bytes()) != digest:
        make_folder(kept)
        move(modulefile, kept / plan.modulefile.name)
        moved.append(plan.modulefile.name)
    if moved:
        shown = ", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
        print(f"hpcdl: {kept} keeps what `make install` had not put into {plan.tree} as it was: {shown}", flush=True)


def _known_in(tree: Path, files: dict[str, str] | None) -> Callable[[str], bool]:
    unfinished = is_marked(tree, (MARKER,))

    def known(name: str) -> bool:
        if _ALWAYS.fullmatch(name) or (unfinished and name.startswith((SCRATCH, ".scratch/"))):
            return True
        return _would_put(name) if files is None else files.get(name) == _digest(tree, name)

    return known


def _would_put(name: str) -> bool:
    """Return whether an installation of this checkout has a file of this path; used for a tree without a list."""
    if _MADE.fullmatch(name):
        return True
    for beginning, source in _COPIED.items():
        if name.startswith(beginning):
            return os.path.lexists(source / name.removeprefix(beginning))
    return False


def _listed(tree: Path) -> tuple[dict[str, str] | None, str]:
    """Return the digests of files and of the modulefile in the list of `tree`; None if it has no readable list."""
    try:
        found = json.loads((tree / LIST).read_bytes())
        return {str(name): str(value) for name, value in found["files"].items()}, str(found["modulefile"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None, ""


def _digest(tree: Path, name: str) -> str:
    """Return what identifies a file's content; in the virtual environment (2.7 GB) only names and links count."""
    path = tree / name
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if not path.is_file():
        return "neither file nor link"
    return "" if name.startswith("venv/") else _digest_of(path.read_bytes())


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()

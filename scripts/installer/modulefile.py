"""The modulefile: etc/modulefiles/hpcdl/hpcdl.lua with the paths of one installation filled in."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from plan import CHECKOUT, InstallError, Plan

from hpcdl.core.storage.disk import creating, make_folder, remove_empty, remove_file, sweep

TEMPLATE = CHECKOUT / "etc" / "modulefiles" / "hpcdl" / "hpcdl.lua"


def modulefile_text(plan: Plan) -> str:
    """Return the text for `plan`; every placeholder is within a Lua string."""
    text = TEMPLATE.read_text()
    for name, value in {
        "@VERSION@": plan.version,
        "@PREFIX@": str(plan.prefix),
        "@MPI@": plan.mpi,
        "@MPI_MODULE@": plan.mpi_module if plan.mpi == "site" else "",
        "@MPI_LIBRARY@": plan.mpi_library if plan.mpi == "site" else "",
    }.items():
        text = text.replace(name, value)
    return text


def write_modulefile(plan: Plan) -> None:
    """Write the modulefile under a hidden name, which Lmod ignores, until it is complete."""
    make_folder(plan.modulefile.parent)
    with creating(plan.modulefile) as file:
        file.write(modulefile_text(plan).encode())


def say_default(plan: Plan) -> None:
    """Print which other versions stay, and whether the link `default`, which staff make, keeps users on one of them."""
    link = plan.modulefile.with_name("default")
    others = sorted(path.stem for path in link.parent.glob("[!.]*.lua") if path != plan.modulefile)
    if others:
        print(f"hpcdl: these versions stay as they are: {', '.join(others)}")
    if link.is_symlink() and link.exists() and link.resolve() != plan.modulefile.resolve():
        print(
            f"hpcdl: {link} points at {link.readlink()}: `module load hpcdl` loads that one; "
            f"`ln -sfn {plan.modulefile.name} {link}` has it load {plan.version}"
        )
    warn_of_default(plan)


def warn_of_default(plan: Plan) -> None:
    """Warn if the link `default`, which staff make, names a missing version, as loading would fail."""
    link = plan.modulefile.with_name("default")
    if not link.is_symlink() or link.exists():
        return
    versions = sorted(path.name for path in link.parent.glob("[!.]*.lua"))
    there = f"`ln -sfn {versions[-1]} {link}` points it at one that is" if versions else f"`rm {link}` removes it"
    print(f"hpcdl: warning: {link} points at {link.readlink()}, which is not there; {there}", file=sys.stderr)


def is_of_this_prefix(plan: Plan, path: Path) -> bool:
    """Return whether `path` is a plain file that contains PREFIX, as the modulefiles of `make install` do."""
    return path.is_file() and not path.is_symlink() and f'"{plan.prefix}"'.encode() in path.read_bytes()


def is_of_another_prefix(plan: Plan) -> bool:
    """Return whether the modulefile's path belongs to an installation elsewhere, or to a file of other origin."""
    return os.path.lexists(plan.modulefile) and not is_of_this_prefix(plan, plan.modulefile)


def remove_modulefile(plan: Plan) -> None:
    """Remove the modulefile, and its folder if no version is left; keep a modulefile of another PREFIX."""
    path = plan.modulefile
    if not is_of_another_prefix(plan):
        if path.parent.is_dir() and not remove_file(path):
            raise InstallError(
                f"{path} belongs to another user, who may remove it; the tree stays as well", exit_code=1
            )
        sweep_modulefiles(plan)
        remove_empty(path.parent)


def sweep_modulefiles(plan: Plan) -> None:
    """Remove what killed installs left of this version's modulefile."""
    sweep(plan.modulefile.parent, re.escape(plan.modulefile.name))

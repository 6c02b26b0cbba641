"""A tree is complete or absent: markers, recovery, and replacing one tree by another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from kept import MARKER, RECEIPT, keep
from modulefile import is_of_another_prefix, is_of_this_prefix, remove_modulefile, sweep_modulefiles
from plan import InstallError, Plan, told
from processes import end_programs_of, ignore_stops, running_from

from hpcdl.core.storage.disk import (
    create,
    is_marked,
    make_folder,
    move,
    remove_empty,
    remove_file,
    remove_marked,
    sweep_marked,
    temporary_name,
)

MARKS = (MARKER, RECEIPT)
"""Files by which the installer recognises its folders."""


def is_ours(tree: Path) -> bool:
    """Return whether `make install` made `tree`, finished or not; a link does not count."""
    return is_marked(tree, MARKS)


def refuse_links(plan: Plan) -> None:
    """Raise InstallError if the tree or the modulefile is a link: nothing is written or removed through one."""
    for path, variable in ((plan.tree, "PREFIX"), (plan.modulefile, "MODULEDIR")):
        if path.is_symlink():
            raise InstallError(f"{path} is a link, which is not followed; remove it, or choose another {variable}")


def refuse_foreign(plan: Plan) -> None:
    """Raise InstallError if foreign files exist under a hidden name of the installer."""
    foreign = [path for path in (plan.replaced, plan.begun) if os.path.lexists(path) and not is_ours(path)]
    foreign += [
        path
        for path in (plan.replaced_modulefile, plan.begun_modulefile)
        if os.path.lexists(path) and not is_of_this_prefix(plan, path)
    ]
    if foreign:
        raise InstallError(f"{foreign[0]} is in the way, and not what `make install` left there; move it elsewhere")


def recover(plan: Plan) -> None:
    """Clear what a killed install left, and restore the tree that it was replacing."""
    if is_marked(plan.tree, (MARKER,)):
        _clear_unfinished(plan)
    sweep_left(plan)
    if is_ours(plan.tree):  # the new tree was complete: only the removal of the old one was interrupted
        _forget_replaced(plan)
    elif not os.path.lexists(plan.tree):
        _put_back(plan)


def _clear_unfinished(plan: Plan) -> None:
    by: dict[str, object] = {}
    with contextlib.suppress(ValueError):  # empty after a crash of the machine: no process is at work
        found = json.loads((plan.tree / MARKER).read_text())
        by = found if isinstance(found, dict) else {}
    here = by.get("host") in (None, socket.gethostname())
    alive = not here or Path(f"/proc/{by.get('pid', 'none')}").exists()
    if alive and not plan.force:
        raise InstallError(
            f"{plan.tree} is being installed by process {by.get('pid')} on {by.get('host')}; wait for it, "
            "or clear it away with FORCE=1"
        )
    print(f"hpcdl: clearing what an unfinished install left in {plan.tree}")
    if here:
        end_programs_of(plan.tree)
    discard(plan)


def sweep_left(plan: Plan) -> None:
    """Remove what killed commands left of this version under hidden names."""
    version = re.escape(plan.version)
    sweep_marked(plan.prefix, rf"{version}|\.{version}\.(?:replaced|begun)", MARKS)
    sweep_modulefiles(plan)
    if is_ours(plan.begun):
        _remove(plan.begun)
    if is_of_this_prefix(plan, plan.begun_modulefile):
        remove_file(plan.begun_modulefile)


def discard(plan: Plan) -> None:
    """Remove the modulefile and the tree, except files that the site has added."""
    keep(plan, plan.tree, plan.modulefile)
    remove_modulefile(plan)
    _remove(plan.tree)


def _remove(tree: Path) -> None:
    left = remove_marked(tree, MARKS)
    if left:
        print(f"hpcdl: warning: not all of {tree} could be removed; look into {left}", file=sys.stderr)


def _set_aside(plan: Plan) -> None:
    """Move the tree and the modulefile aside until the new ones are complete."""
    for place, waiting in ((plan.tree, plan.replaced), (plan.modulefile, plan.replaced_modulefile)):
        if os.path.lexists(place):
            move(place, waiting)


def _put_back(plan: Plan) -> None:
    """Move the replaced tree and modulefile back."""
    for waiting, place in ((plan.replaced, plan.tree), (plan.replaced_modulefile, plan.modulefile)):
        if os.path.lexists(waiting):
            move(waiting, place)


def _forget_replaced(plan: Plan) -> None:
    if is_ours(plan.replaced):
        keep(plan, plan.replaced, plan.replaced_modulefile)
        _remove(plan.replaced)
    if is_of_this_prefix(plan, plan.replaced_modulefile):
        remove_file(plan.replaced_modulefile)


def check_replaceable(plan: Plan) -> None:
    """Raise InstallError unless the path is free, or FORCE=1 is set and no process runs from it."""
    if is_of_another_prefix(plan):
        raise InstallError(
            f"{plan.modulefile} belongs to an installation outside {plan.prefix}; choose another MODULEDIR, "
            "or a SUFFIX such as SUFFIX=-openmpi"
        )
    if not plan.tree.exists():
        return
    if not is_ours(plan.tree):
        raise InstallError(f"{plan.tree} exists and is no hpcdl tree; choose another PREFIX")
    if not plan.force:
        raise InstallError(f"hpcdl {plan.version} is installed in {plan.tree} already; replace it with FORCE=1")
    refuse_when_used(plan.tree)


def refuse_when_used(tree: Path) -> None:
    """Raise InstallError if a process of this machine runs from `tree`."""
    processes = running_from(tree)
    if processes:
        listed = ", ".join(map(str, processes[:5])) + (", ..." if len(processes) > 5 else "")
        raise InstallError(f"{tree} is in use by process {listed}; wait until they end, or install another version")


@contextlib.contextmanager
def replacing(plan: Plan) -> Iterator[None]:
    """Make the tree with its marker, and remove the marker at the end; on failure restore the previous state."""
    places = (plan.prefix, plan.modulefile.parent)
    missing = [folder for place in places for folder in (place, *place.parents) if not folder.exists()]
    building = plan.prefix / temporary_name(plan.version)
    begun: os.stat_result | None = None
    try:
        begun = _begin(building)
        _set_aside(plan)
        move(building, plan.tree)
        yield
        remove_file(plan.tree / MARKER)
        ignore_stops()
    except BaseException as error:
        ignore_stops()
        # Ask the disk: a signal may arrive between any two lines.
        if begun and plan.tree.exists() and os.path.samestat(begun, plan.tree.lstat()):
            discard(plan)
        if os.path.lexists(building):
            _remove(building)
        _put_back(plan)
        for folder in missing:
            remove_empty(folder)
        if isinstance(error, OSError):
            raise InstallError(f"{told(error)}; nothing was left behind", exit_code=1) from None
        raise
    _forget_replaced(plan)


def _begin(building: Path) -> os.stat_result:
    """Make a folder with its marker, for the tree's path: a tree without a mark never exists there.

    Returns the identity of that folder, whatever its name.
    """
    make_folder(building)
    building.chmod(0o755)
    create(building / MARKER, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
    return building.lstat()

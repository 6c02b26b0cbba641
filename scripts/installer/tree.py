"""A tree is whole, or it is not there: markers, recovery, and replacing one tree by another."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from modulefile import is_of_another_prefix, remove_modulefile
from plan import InstallError, Plan
from processes import end_programs_of, ignore_stops, running_from

MARKER = ".hpcdl-unfinished"
"""In a tree that is being built: says by whom."""
RECEIPT = "install.json"
"""In a tree that is whole: says what it is."""


def is_ours(tree: Path) -> bool:
    """Whether `make install` made `tree`, finished or not."""
    return (tree / RECEIPT).is_file() or (tree / MARKER).is_file()


def recover(plan: Plan) -> None:
    """Clear what a killed install left, and put back the tree that it was replacing."""
    shutil.rmtree(plan.begun, ignore_errors=True)
    marker = plan.tree / MARKER
    if marker.is_file():
        by = json.loads(marker.read_text())
        alive = by["host"] != socket.gethostname() or Path(f"/proc/{by['pid']}").exists()
        if alive and not plan.force:
            raise InstallError(
                f"{plan.tree} is being installed by process {by['pid']} on {by['host']}; wait for it, "
                "or clear it away with FORCE=1"
            )
        print(f"hpcdl: clearing what an unfinished install left in {plan.tree}")
        if by["host"] == socket.gethostname():
            end_programs_of(plan.tree)
        discard(plan)
    if plan.tree.exists():  # the new tree was whole: only the old one's removal was cut short
        _forget_replaced(plan)
    else:
        _put_back(plan)


def discard(plan: Plan) -> None:
    """Remove the modulefile and the tree, gone in one step: its files go under a name that `recover` clears."""
    remove_modulefile(plan)
    shutil.rmtree(plan.begun, ignore_errors=True)
    plan.tree.rename(plan.begun)
    shutil.rmtree(plan.begun, ignore_errors=True)


def _set_aside(plan: Plan) -> None:
    """The tree and the modulefile that are to be replaced wait until the new ones are whole."""
    for place, waiting in ((plan.tree, plan.replaced), (plan.modulefile, plan.replaced_modulefile)):
        if place.exists():
            place.rename(waiting)


def _put_back(plan: Plan) -> None:
    """The tree and the modulefile that were to be replaced, where they were."""
    for waiting, place in ((plan.replaced, plan.tree), (plan.replaced_modulefile, plan.modulefile)):
        if waiting.exists():
            waiting.rename(place)


def _forget_replaced(plan: Plan) -> None:
    plan.replaced_modulefile.unlink(missing_ok=True)
    shutil.rmtree(plan.replaced, ignore_errors=True)


def check_replaceable(plan: Plan) -> None:
    """InstallError unless the place is free, or FORCE=1 and nobody runs from it."""
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
    """InstallError where a process of this machine runs from `tree`."""
    processes = running_from(tree)
    if processes:
        listed = ", ".join(map(str, processes[:5])) + (", ..." if len(processes) > 5 else "")
        raise InstallError(f"{tree} is in use by process {listed}; wait until they end, or install another version")


@contextlib.contextmanager
def replacing(plan: Plan) -> Iterator[None]:
    """Make the tree with its marker, and take the marker away at the end; on failure put things back as they were."""
    made = [folder for folder in (plan.prefix, plan.moduledir) if not folder.exists()]
    begun: os.stat_result | None = None
    try:
        begun = _begin(plan)
        _set_aside(plan)
        plan.begun.rename(plan.tree)
        yield
        (plan.tree / MARKER).unlink()
        ignore_stops()
    except BaseException as error:
        ignore_stops()
        # Asked of the disk: a signal may come between any two lines.
        if begun and plan.tree.exists() and os.path.samestat(begun, plan.tree.stat()):
            discard(plan)
        shutil.rmtree(plan.begun, ignore_errors=True)
        _put_back(plan)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: somebody else's
                folder.rmdir()
        if isinstance(error, OSError):
            raise InstallError(f"{error.strerror} ({error.filename}); nothing was left behind", exit_code=1) from None
        raise
    _forget_replaced(plan)


def _begin(plan: Plan) -> os.stat_result:
    """A folder with its marker, for the tree's place: at no time is a tree there that does not say what it is.

    Returns what tells that folder from any other, under whatever name.
    """
    shutil.rmtree(plan.begun, ignore_errors=True)
    plan.begun.mkdir(parents=True)
    plan.begun.chmod(0o755)
    (plan.begun / MARKER).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    return plan.begun.stat()

"""The modulefile: etc/modulefiles/hpcdl/hpcdl.lua with the paths of one installation filled in."""

from __future__ import annotations

from pathlib import Path

from plan import CHECKOUT, Plan

TEMPLATE = CHECKOUT / "etc" / "modulefiles" / "hpcdl" / "hpcdl.lua"


def modulefile_text(plan: Plan) -> str:
    """The text for `plan`; every placeholder stands within a Lua string."""
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
    """Write the modulefile under a name that Lmod does not see, then rename it."""
    plan.modulefile.parent.mkdir(parents=True, exist_ok=True)
    hidden = _hidden(plan)
    hidden.write_text(modulefile_text(plan))
    hidden.chmod(0o644)
    hidden.replace(plan.modulefile)


def _hidden(plan: Plan) -> Path:
    return plan.modulefile.with_name(f".{plan.modulefile.name}.new")


def is_of_another_prefix(plan: Plan) -> bool:
    """Whether the place of the modulefile is taken by an installation elsewhere, or by a file of other making."""
    return plan.modulefile.exists() and f'"{plan.prefix}"' not in plan.modulefile.read_text()


def remove_modulefile(plan: Plan) -> None:
    """Remove the modulefile, and its folder when no version is left; leave one that speaks of another PREFIX."""
    path = plan.modulefile
    if is_of_another_prefix(plan):
        return
    path.unlink(missing_ok=True)
    _hidden(plan).unlink(missing_ok=True)
    if path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()

"""hpcdl installed as cluster staff would: from a wheelhouse, with `make install`, under a restrictive umask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Finished
from tests.lab.hosts import USER, Lab
from tests.lab.needs import LMOD, SYSTEM_PYTHON
from tests.site.checkouts import Checkout, copy_checkout, files_below

OPEN_MPI = "libmpi.so.40"
"""Debian's Open MPI, by its soname: the lab's counterpart of a site's MPI."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Two versions of one modulefile tree: `with_mpich` (embedded, pmi2) and `with_site_mpi` (Open MPI, pmix).

    `outputs` holds what each `make` printed; `changed_outside` the paths of home and checkout that an install changed.
    """

    prefix: Path
    prefix_with_space: Path
    moduledir: Path
    wheelhouse: Path
    checkout: Checkout
    with_mpich: str
    with_site_mpi: str
    outputs: dict[str, Finished]
    changed_outside: frozenset[str]

    def settings(self, prefix: Path | None = None) -> tuple[str, ...]:
        """Return the variables of `make install`."""
        return (
            f"PREFIX={prefix or self.prefix}",
            f"MODULEDIR={self.moduledir}",
            f"WHEELHOUSE={self.wheelhouse}",
            f"PYTHON={SYSTEM_PYTHON}",
        )

    def script(self, *commands: str, version: str | None = None) -> str:
        """Return a bash script that loads the module and runs `commands`; it stops at the first that fails."""
        load = f"module load hpcdl/{version or self.with_mpich}"
        return "\n".join(
            (f"source {LMOD}/init/bash", f"module use {self.moduledir}", f"{load} || exit", "set -e", *commands)
        )

    def script_without_module(self, *commands: str) -> str:
        """The same without Lmod: after `source .../bin/activate`, as in a user's virtual environment."""
        activate = f"source '{self.prefix / self.with_mpich / 'venv' / 'bin' / 'activate'}'"
        return "\n".join((activate, "set -e", *commands))

    def run(
        self,
        lab: Lab,
        *commands: str,
        version: str | None = None,
        user: str = USER,
        host: str = "login",
        timeout_s: float = 300.0,
    ) -> Finished:
        """Run `commands` in a fresh shell with the module loaded, as an unprivileged user of the lab."""
        line = ["bash", "--noprofile", "--norc", "-c", self.script(*commands, version=version)]
        return lab.run(line, user=user, host=host, env={"LMOD_PAGER": "none"}, timeout_s=timeout_s)


def install_site(shared: Path, *, both_train: bool) -> Site:
    """Fill a wheelhouse and install twice from it; the second time into a path with a space, over an old tree.

    Unless `both_train` the second is without TensorFlow, which takes most of the time of an install: it differs only in
    its MPI, its paths and its modulefile.
    """
    checkout = copy_checkout(shared / "src" / "hpcdl", "1.0")
    second = copy_checkout(shared / "src" / "hpcdl site", "1.1")
    if not both_train:
        leave_out(second, "tensorflow")
    home = shared / "src" / "home"
    home.mkdir()
    site = Site(
        prefix=shared / "apps" / "hpcdl",
        prefix_with_space=shared / "more apps" / "hpcdl",
        moduledir=shared / "apps" / "modulefiles",
        wheelhouse=shared / "wheels",
        checkout=checkout,
        with_mpich="1.0",
        with_site_mpi="1.1-openmpi",
        outputs={},
        changed_outside=frozenset(),
    )
    strict = ["bash", "-c", 'umask 077; exec "$@"', "strict"]
    outputs = {
        "wheelhouse": checkout.make(
            "wheelhouse", f"WHEELHOUSE={site.wheelhouse}", f"PYTHON={SYSTEM_PYTHON}", timeout_s=1800
        )
    }
    assert outputs["wheelhouse"].code == 0, outputs["wheelhouse"].err
    before = files_below(checkout.folder) | files_below(home)
    environment = {"HOME": str(home)}
    outputs["mpich"] = checkout.make("install", *site.settings(), before=strict, env=environment, timeout_s=1800)
    assert outputs["mpich"].code == 0, outputs["mpich"].err
    after = files_below(checkout.folder) | files_below(home)
    old = site.prefix_with_space / site.with_site_mpi
    old.mkdir(parents=True)
    (old / "install.json").write_text("{}")
    (old / "stale").touch()
    settings = (
        *site.settings(site.prefix_with_space),
        "MPI=site",
        f"MPI_LIBRARY={OPEN_MPI}",
        "SUFFIX=-openmpi",
        "VERSION=1.1",
        "FORCE=1",
    )
    outputs["site"] = second.make("install", *settings, before=strict, timeout_s=1800)
    assert outputs["site"].code == 0, outputs["site"].err
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    site.outputs.update(outputs)
    return Site(**{**vars(site), "changed_outside": frozenset(changed)})


def leave_out(checkout: Checkout, package: str) -> None:
    """Remove `package` from a checkout's dependencies."""
    path = checkout.folder / "pyproject.toml"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(f'    "{package}>=')]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept))

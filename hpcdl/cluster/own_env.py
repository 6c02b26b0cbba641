"""`hpcdl env create`: a virtual environment of the user's own that sees all packages of an installation.

The installation stays as it is, for it may be everybody's. What is installed into the new environment comes before the
installation's packages, and pip keeps to the installation's versions: nothing is there twice, and what cannot go with
it is refused by name. Ranks start with the Python of this environment, on every node that sees its folder.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcdl import __version__
from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.paths import own_program, share_folder
from hpcdl.core.storage.disk import create, make_folder, make_link
from hpcdl.core.storage.files import read_json

MARK = "hpcdl-env.json"
"""In the environment's folder; its `base` is the installation's environment."""
STAGED = "hpcdl-base"
"""Of a copy on a node's storage: the folder in it that holds what the environment stands on (cluster/stage_env.py)."""


def base_of(prefix: Path = Path(sys.prefix)) -> Path | None:
    """The environment that the one at `prefix` stands on; None where it stands alone.

    CorruptError where its mark says something else.
    """
    mark = prefix / MARK
    if not mark.is_file():
        return None
    base = read_json(mark).get("base")
    if not isinstance(base, str):
        raise CorruptError(f"{mark} names no environment; make it anew with `hpcdl env create`")
    return Path(base)


SCHEMA = "hpcdl.env/1"
PINS = "hpcdl-pins.txt"
NOT_PINNED = frozenset(("hpcdl", "pip", "setuptools", "wheel"))
"""hpcdl itself, which is not to be installed again; and what pip needs to build packages, in versions of theirs."""
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
"""Variables by which other Pythons' packages, or other folders, would come in."""
_PTH = (
    "import os, site, sys; own = os.path.join(sys.prefix, {staged!r}); "
    "site.addsitedir(os.path.join(own, {below!r}) if os.path.isdir(own) else {packages!r})\n"
)
"""What Python runs at its start in the environment: the installation's packages come behind its own.

`addsitedir` reads the installation's own .pth files too, by which a checkout is found.
"""
_MPI = (
    "import os; {{'MPI4PY_LIBMPI', 'MPI4PY_MPIABI'}} & os.environ.keys() or "
    "os.environ.update(MPI4PY_LIBMPI={library!r})\n"
)
"""The same for the MPI that a wheel has put into the installation: mpi4py looks in the environment's own lib alone."""
_LIBRARIES = ("libmpi.so.12", "libmpi.so.40")
"""Of MPICH and of Open MPI, in mpi4py's order."""
_PROGRAM = """#!/bin/sh
# {name} of this environment, which stands on {base}
if [ ! -d {quoted} ]; then
    echo "hpcdl: {base} is gone, on which this environment stands; make a new one with: hpcdl env create" >&2
    exit 2
fi
exec {command} "$@"
"""


def create_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Make the environment in `folder`, which must be new or empty, and install `packages` as pip takes them.

    Returns the folder as an absolute path. UsageError where it is taken; HpcdlError where Python's venv or pip fails,
    whose output has been seen.
    """
    folder = folder.expanduser().absolute()
    if (folder / MARK).is_file():
        raise UsageError(f"{folder} is such an environment already; add packages with {_python(folder)} -m pip install")
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; name a new folder")
    if re.search(r"\s", str(folder)):  # pip's configuration takes a blank for the end of a path
        raise UsageError(f"{folder} has a blank in its path, in which pip loses the versions to keep; name another")
    base = base_of() or Path(sys.prefix)
    make_folder(folder)
    _run(own_program("venv", "--without-pip", str(folder)), f"no environment could be made in {folder}")
    _stand_on(folder, base)
    if packages:
        add_packages(folder, packages)
    return folder


def add_packages(folder: Path, packages: Sequence[str]) -> None:
    """Install into the environment; HpcdlError where pip refuses, which says why."""
    words = ("install", "--disable-pip-version-check", *packages)
    line = own_program("pip", *words, python=str(_python(folder)))
    again = f"{_python(folder)} -m pip install ..."
    _run(line, f"pip has installed nothing (see above); {folder} is ready, and `{again}` tries again")


def _stand_on(folder: Path, base: Path) -> None:
    """Give the new environment the installation's packages, programs and files, and pip their versions."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)}))
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    below = str(packages.relative_to(base))
    library = next((base / "lib" / name for name in _LIBRARIES if (base / "lib" / name).exists()), None)
    start = _PTH.format(staged=STAGED, below=below, packages=str(packages))
    start += "" if library is None else _MPI.format(library=str(library))
    create(own / "hpcdl-base.pth", start.encode())
    create(folder / PINS, "".join(f"{line}\n" for line in sorted(_pins(packages))).encode())
    create(folder / "pip.conf", f"[global]\nconstraint = {folder / PINS}\n".encode())
    python = shlex.quote(str(_python(folder)))
    programs = {"hpcdl": f"{python} -P -m hpcdl", "hpcdl-python": python, "pip": f"{python} -P -m pip"}
    if (base / "bin" / "mpiexec").exists():  # that of the MPI which comes with the installation
        programs["mpiexec"] = shlex.quote(str(base / "bin" / "mpiexec"))
    for name, command in programs.items():
        text = _PROGRAM.format(name=name, base=base, quoted=shlex.quote(str(base)), command=command)
        create(folder / "bin" / name, text.encode(), mode=0o755)
    if (base / "share" / "hpcdl").is_dir():
        make_folder(folder / "share")
        make_link(folder / "share" / "hpcdl", str(share_folder()))
    mark = {"schema": SCHEMA, "base": str(base), "hpcdl": __version__, "python": sys.version.split()[0]}
    create(folder / MARK, f"{json.dumps(mark, indent=1)}\n".encode())


def _pins(packages: Path) -> Iterator[str]:
    """NAME==VERSION of what is installed in the folder `packages`."""
    for found in importlib.metadata.distributions(path=[str(packages)]):
        name = found.metadata["Name"]
        # A version of somebody's own build (1.2+cu12) is in no index: without its ending any build of it will do.
        if name and re.sub(r"[-_.]+", "-", name).lower() not in NOT_PINNED:
            yield f"{name}=={found.version.partition('+')[0]}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _run(line: Sequence[str], problem: str) -> None:
    """Run a program whose output the user sees; HpcdlError with the `problem` where it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    if subprocess.run(line, env=environment, check=False, stdout=sys.stderr).returncode:
        raise HpcdlError(problem)

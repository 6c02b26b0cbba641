"""Environments of ranks: with loaded modules, a user's own beside an installation, or a packed copy for each node.

Hundreds of ranks that import TensorFlow from a parallel file system look up tens of thousands of small files each.
Instead, one node reads one big file and broadcasts it to the others (comm/mpi/spread).
The installation stays unchanged, since others may share it. Packages of the new environment take precedence over the
installation's. pip keeps to the installation's versions: nothing is installed twice, and pip refuses incompatible
packages by name. Ranks start with the Python of this environment, on every node that sees its folder.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hpcdl import __version__
from hpcdl.cluster.launchers.base import Launcher
from hpcdl.cluster.processes import NodesFailed, on_every_node
from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.paths import own_program, share_folder, user_cache_folder
from hpcdl.core.storage.disk import create, make_folder, make_link, make_output_folder, remove_file, replacing
from hpcdl.core.storage.files import read_json
from hpcdl.core.storage.lock import FILE_NAME, JOB_VARIABLES, writing

LOADED = "HPCDL_LOADED_MODULES"
"""Set in a program that was started with modules, so that it does not load them again."""
_SCRIPT = """
names=$1 before=$(command -v hpcdl); shift
if ! type module >/dev/null 2>&1; then
  for init in "${LMOD_DIR:-/usr/share/lmod/lmod/libexec}/../init/bash" "${MODULESHOME:-/usr/share/modules}/init/bash"
  do [ -r "$init" ] && . "$init" && break; done
fi
type module >/dev/null 2>&1 || { echo "hpcdl: --module $names: there is no command module here" >&2; exit 2; }
for name in ${names//,/ }; do
  told=$(module load "$name" 2>&1) && module load "$name" >/dev/null 2>&1 || {
    told=$(echo $told); echo "hpcdl: --module $name cannot be loaded: ${told:0:160}; see module avail" >&2; exit 2
  }
done
now=$(command -v hpcdl)
[ -n "$now" ] && [ "$now" != "$before" ] && exec "$now" "${@:5}"
exec "$@"
"""
"""Loads each module in a subshell first to get its error message; if a module brings its own hpcdl, that one runs."""


def go_on_with(modules: str, arguments: Sequence[str]) -> None:
    """Replace this process by `hpcdl ARGUMENTS` with `modules` (names by commas) loaded.

    Returns if they are loaded already. Raises UsageError without bash. If a module cannot be loaded, the new program
    says so and exits with 2.
    """
    if os.environ.get(LOADED) == modules:
        return
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("--module needs bash; load the modules yourself, and leave it out")
    command = [bash, "-c", _SCRIPT, "hpcdl", modules, sys.executable, "-P", "-m", "hpcdl", *arguments]
    os.execve(bash, command, {**os.environ, LOADED: modules})


_LEFT_OUT = {"bin/activate", "include"}
_ENOUGH_S = 1800.0
UNPACK = """
umask 077
said=$({ mkdir -- "$1" && tar -C "$1" -xf "$2"; } 2>&1) && exit
read -r _ _ _ free _ < <(df -Ph -- "${1%/*}" | tail -n 1)
echo "hpcdl: node $(uname -n): ${said%%$'\\n'*} ($free free in ${1%/*})" >&2
exit 1
"""
"""mkdir refuses anything that exists: a link, or another user's folder. `-` is standard input."""
SPREADING = "spread: all ranks are there"
"""Printed by comm/mpi/spread as soon as MPI is up; a later failure is due to a node itself."""
REMOVE = 'test -O "$1" && test ! -L "$1" && rm -rf -- "$1" || true'


def fingerprint(prefix: Path) -> str:
    """Return a name for the environment at `prefix`, which changes with its path, Python and installed packages."""
    base = base_of(prefix)
    places = [prefix] if base is None else [prefix, base]
    packages = [path.name for root in places for path in sorted(root.glob("lib/python*/site-packages/*.dist-info"))]
    folders = [path for root in places for path in sorted(root.glob("lib/python*/site-packages"))]
    stamps = [str(path.stat().st_mtime_ns) for path in folders]
    text = "\n".join([*map(str, places), sys.version, *packages, *stamps])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pack(prefix: Path, folder: Path | None = None) -> Path:
    """Return one uncompressed tar of the virtual environment at `prefix`; made once, then reused from `folder`.

    The base of a user's own environment is included, as STAGED.
    Raises UsageError if `prefix` is not a virtual environment: only those find their Python from any place.
    """
    if not (prefix / "pyvenv.cfg").is_file():
        raise UsageError(f"--stage-env: {prefix} is not a virtual environment; install hpcdl into one")
    folder = folder or user_cache_folder() / "environments"
    archive = folder / f"{fingerprint(prefix)}.tar"
    if archive.is_file():
        return archive
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(archive) as temporary, tarfile.open(temporary, "w") as tar:
            for name in sorted(os.listdir(prefix)):  # noqa: PTH208  names, not paths
                if name not in _LEFT_OUT:
                    tar.add(prefix / name, arcname=name)
            if (base := base_of(prefix)) is not None:
                tar.add(base, arcname=STAGED)
        for old in folder.glob("*.tar"):
            if old != archive:
                remove_file(old)
    except OSError as error:
        raise HpcdlError(
            f"--stage-env: cannot write {archive}: {error.strerror}; set XDG_CACHE_HOME elsewhere"
        ) from error
    return archive


def node_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in which each node unpacks: on its own storage, by user and job, the same on all nodes."""
    base = environment.get("HPCDL_NODE_STORAGE") or environment.get("TMPDIR") or "/tmp"
    job = next((environment[name] for name in JOB_VARIABLES if environment.get(name)), "") or f"pid{os.getpid()}"
    restart = environment.get("SLURM_RESTART_COUNT", "0")
    return Path(base) / f"hpcdl-env-{getpass.getuser()}-{job}-{restart}-{os.getpid()}"


@contextlib.contextmanager
def staged(launcher: Launcher, num_nodes: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Unpack this Python's environment on `num_nodes` nodes; yield the Python that starts the ranks.

    The folders are removed at the end, also after a signal that this process handles.
    """
    archive = pack(Path(sys.prefix))
    folder = node_folder(environment)

    def everywhere(*command: str, mpi: bool = False) -> None:
        on_every_node(launcher, num_nodes, command, environment, timeout_s=_ENOUGH_S, what="--stage-env", mpi=mpi)

    try:
        if num_nodes < 2 or not _broadcast(everywhere, num_nodes, archive, folder):
            everywhere("bash", "-c", UNPACK, "unpack", str(folder), str(archive))
        yield str(folder / "bin" / Path(sys.executable).name)
    finally:
        with contextlib.suppress(HpcdlError):
            everywhere("bash", "-c", REMOVE, "remove", str(folder))


def _broadcast(everywhere: Callable[..., None], num_nodes: int, archive: Path, folder: Path) -> bool:
    """Unpack on all nodes what one node reads; return False if MPI does not start here, so that each node must read."""
    unpack = ["bash", "-c", UNPACK, "unpack", str(folder), "-"]
    try:
        everywhere(*own_program("hpcdl.comm.mpi.spread", str(archive), str(num_nodes), *unpack), mpi=True)
    except (NodesFailed, UsageError) as error:
        if isinstance(error, NodesFailed) and SPREADING in error.printed:
            raise
        sys.stderr.write(f"hpcdl: {error}; no broadcast then: each node reads {archive} for itself\n")
        return False
    return True


MARK = "hpcdl-env.json"
"""A file in the environment's folder; its `base` is the installation's environment."""
STAGED = "hpcdl-base"
"""The folder for the base environment, in a copy on a node's storage (cluster/own_env.py)."""


def base_of(prefix: Path = Path(sys.prefix)) -> Path | None:
    """Return the base of the environment at `prefix`; None if it has none.

    Raises CorruptError if its mark is invalid.
    """
    mark = prefix / MARK
    if not mark.is_file():
        return None
    base = read_json(mark).get("base")
    if not isinstance(base, str):
        raise CorruptError(f"{mark} names no environment; {_anew(prefix)}")
    return Path(base)


def _anew(folder: Path) -> str:
    """Return how to replace the environment in `folder`, whose own hpcdl no longer works."""
    line = shlex.join(["hpcdl", "env", "create", f"{folder}-new"])
    return f"in a new shell load the module of today, and name your packages behind: {line}"


SCHEMA = "hpcdl.env/1"
PINS = "hpcdl-pins.txt"
NOT_PINNED = frozenset(("hpcdl", "pip", "setuptools", "wheel"))
"""hpcdl itself, which must not be installed again; and build tools that pip needs in versions of its choice."""
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
"""Variables that would bring in packages of another Python, or other folders."""
_PTH = (
    "import os, site, sys; own = os.path.join(sys.prefix, {staged!r}); "
    "site.addsitedir(os.path.join(own, {below!r}) if os.path.isdir(own) else {packages!r})\n"
)
"""Code that Python runs at its start in the environment: it appends the installation's packages.

`addsitedir` also reads the installation's own .pth files, which locate a checkout.
"""
_MPI = (
    "import os; {{'MPI4PY_LIBMPI', 'MPI4PY_MPIABI'}} & os.environ.keys() or "
    "os.environ.update(MPI4PY_LIBMPI={library!r})\n"
)
"""The same for the MPI of a wheel in the installation: mpi4py searches only the environment's own lib."""
_LIBRARIES = ("libmpi.so.12", "libmpi.so.40")
"""Libraries of MPICH and of Open MPI, in mpi4py's order."""
_PROGRAM = """#!/bin/sh
# {name} of this environment, which builds on {base}
if [ ! -d {quoted} ]; then
    echo {gone} >&2
    exit 2
fi
exec {command} "$@"
"""

_REQUIREMENT = re.compile(r"[\w.-]+(\[[\w,-]+\]|[=<>~!]=|[<>])[^/]*")
"""A package with a version or extras."""


def create_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Make the environment in `folder`, which must be new or empty, and install `packages` by pip.

    Returns the folder as an absolute path. Raises UsageError if it is taken; HpcdlError if Python's venv or pip fails,
    whose output the user sees.
    """
    if _REQUIREMENT.fullmatch(str(folder)):
        line = shlex.join(["hpcdl", "env", "create", "my-env", str(folder), *packages])
        raise UsageError(f"FOLDER {str(folder)!r} reads like a package; name the folder first: {line}")
    folder = folder.expanduser().absolute()
    if (folder / MARK).is_file():
        raise UsageError(f"{folder} is such an environment already; add packages with {_python(folder)} -m pip install")
    _check_empty(folder)
    if re.search(r"\s", str(folder)):  # in pip's configuration a blank ends a path
        raise UsageError(f"{folder} has a blank in its path, in which pip loses the versions to keep; name another")
    base = base_of() or Path(sys.prefix)
    new_folders = make_output_folder(folder, "")
    with writing(folder):
        _check_empty(folder)  # again: another call may have ended meanwhile
        try:
            _run(own_program("venv", "--without-pip", str(folder)), f"no environment could be made in {folder}")
            _stand_on(folder, base)
        except BaseException:  # half an environment would block the next try
            for new in new_folders:
                new.remove(if_empty=new.path != folder)
            raise
        if packages:
            add_packages(folder, packages)
    return folder


def _check_empty(folder: Path) -> None:
    if os.path.lexists(folder) and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {FILE_NAME}):
        raise UsageError(f"{folder} exists and is not empty; name a new folder")


def add_packages(folder: Path, packages: Sequence[str]) -> None:
    """Install into the environment. Raises HpcdlError if pip refuses; pip prints the reason."""
    arguments = ("install", "--disable-pip-version-check", *packages)
    line = own_program("pip", *arguments, python=str(_python(folder)))
    again = f"{_python(folder)} -m pip install ..."
    _run(line, f"pip has installed nothing (see above); {folder} is ready, and `{again}` tries again")


def _stand_on(folder: Path, base: Path) -> None:
    """Give the new environment the installation's packages, programs and files, and give pip their versions."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)}))
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    below = str(packages.relative_to(base))
    library = next((base / "lib" / name for name in _LIBRARIES if (base / "lib" / name).exists()), None)
    start = _PTH.format(staged=STAGED, below=below, packages=str(packages))
    start += "" if library is None else _MPI.format(library=str(library))
    create(site_packages / "hpcdl-base.pth", start.encode())
    create(folder / PINS, "".join(f"{line}\n" for line in sorted(_pins(packages))).encode())
    create(folder / "pip.conf", f"[global]\nconstraint = {folder / PINS}\n".encode())
    python = shlex.quote(str(_python(folder)))
    programs = {"hpcdl": f"{python} -P -m hpcdl", "hpcdl-python": python, "pip": f"{python} -P -m pip"}
    if (base / "bin" / "mpiexec").exists():  # that of the MPI in the installation
        programs["mpiexec"] = shlex.quote(str(base / "bin" / "mpiexec"))
    gone = shlex.quote(f"hpcdl: {base} is gone, and this environment needs it; {_anew(folder)}")
    for name, command in programs.items():
        text = _PROGRAM.format(name=name, base=base, quoted=shlex.quote(str(base)), gone=gone, command=command)
        create(folder / "bin" / name, text.encode(), mode=0o755)
    if (base / "share" / "hpcdl").is_dir():
        make_folder(folder / "share")
        make_link(folder / "share" / "hpcdl", str(share_folder()))
    mark = {"schema": SCHEMA, "base": str(base), "hpcdl": __version__, "python": sys.version.split()[0]}
    create(folder / MARK, f"{json.dumps(mark, indent=1)}\n".encode())


def _pins(packages: Path) -> Iterator[str]:
    """Yield NAME==VERSION of the packages installed in the folder `packages`."""
    for distribution in importlib.metadata.distributions(path=[str(packages)]):
        name = distribution.metadata["Name"]
        # No index has the version of a local build (1.2+cu12): without its suffix any build of it is accepted.
        if name and re.sub(r"[-_.]+", "-", name).lower() not in NOT_PINNED:
            yield f"{name}=={distribution.version.partition('+')[0]}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _run(line: Sequence[str], problem: str) -> None:
    """Run a program whose output the user sees. Raises HpcdlError with the `problem` if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    if subprocess.run(line, env=environment, check=False, stdout=sys.stderr).returncode:
        raise HpcdlError(problem)

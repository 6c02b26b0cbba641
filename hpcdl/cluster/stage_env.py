"""The Python environment on each node's own storage: packed into one file, unpacked by every node first.

Hundreds of ranks that import TensorFlow from a parallel file system look up tens of thousands of small files each. One
big file is read instead, by one node, which broadcasts it to the others (comm/mpi/spread).
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hpcdl.cluster.launchers.base import Launcher
from hpcdl.cluster.own_env import STAGED, base_of
from hpcdl.cluster.processes import NodesFailed, on_every_node
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.paths import own_program, user_cache_folder
from hpcdl.core.storage.disk import remove_file, replacing
from hpcdl.core.storage.lock import JOB_VARIABLES

_LEFT_OUT = {"bin/activate", "include"}
_ENOUGH_S = 1800.0
UNPACK = """
umask 077
said=$({ mkdir -- "$1" && tar -C "$1" -xf "$2"; } 2>&1) && exit
read -r _ _ _ free _ < <(df -Ph -- "${1%/*}" | tail -n 1)
echo "hpcdl: node $(uname -n): ${said%%$'\\n'*} ($free free in ${1%/*})" >&2
exit 1
"""
"""mkdir refuses whatever is there already: a link, or a folder of somebody else's. `-` is standard input."""
SPREADING = "spread: all ranks are there"
"""What comm/mpi/spread prints as soon as MPI is up; what fails later is a node's own fault."""
REMOVE = 'test -O "$1" && test ! -L "$1" && rm -rf -- "$1" || true'


def fingerprint(prefix: Path) -> str:
    """A name for the environment at `prefix`: changes with its place, its Python and its installed packages."""
    base = base_of(prefix)
    places = [prefix] if base is None else [prefix, base]
    packages = [path.name for one in places for path in sorted(one.glob("lib/python*/site-packages/*.dist-info"))]
    folders = [path for one in places for path in sorted(one.glob("lib/python*/site-packages"))]
    stamps = [str(path.stat().st_mtime_ns) for path in folders]
    text = "\n".join([*map(str, places), sys.version, *packages, *stamps])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pack(prefix: Path, folder: Path | None = None) -> Path:
    """One uncompressed tar of the virtual environment at `prefix`; made once, taken from `folder` later.

    What an environment of the user's own stands on comes along, in STAGED.

    UsageError where `prefix` is not a virtual environment: only those know their Python from any place.
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
    """Where each node unpacks: on its own storage, named by user and job, alike on all nodes."""
    base = environment.get("HPCDL_NODE_STORAGE") or environment.get("TMPDIR") or "/tmp"
    job = next((environment[name] for name in JOB_VARIABLES if environment.get(name)), "") or f"pid{os.getpid()}"
    restart = environment.get("SLURM_RESTART_COUNT", "0")
    return Path(base) / f"hpcdl-env-{getpass.getuser()}-{job}-{restart}-{os.getpid()}"


@contextlib.contextmanager
def staged(launcher: Launcher, num_nodes: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Unpack this Python's environment on `num_nodes` nodes; yields the Python that ranks are to be started with.

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
    """Unpack everywhere what one node reads; False where no MPI starts here, so that each has to read for itself."""
    unpack = ["bash", "-c", UNPACK, "unpack", str(folder), "-"]
    try:
        everywhere(*own_program("hpcdl.comm.mpi.spread", str(archive), str(num_nodes), *unpack), mpi=True)
    except (NodesFailed, UsageError) as error:
        if isinstance(error, NodesFailed) and SPREADING in error.printed:
            raise
        sys.stderr.write(f"hpcdl: {error}; no broadcast then: each node reads {archive} for itself\n")
        return False
    return True

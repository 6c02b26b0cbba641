"""The mpiexec of the MPI library in use is chosen, not just the first on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from hpcdl.core.errors import UsageError

VERSIONS = {
    "openmpi": "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4",
    "mpich": "MPICH Version:      5.0.2\nMPICH Device: ch4",
    "intel": "Intel(R) MPI Library 2021.11 for Linux* OS\n",
    "cray": "MPI VERSION    : CRAY MPICH version 8.1.27.26 (ANL base 3.4a2)\n",
}
LAUNCHERS = {
    "openmpi": "mpiexec (OpenRTE) 4.1.4",
    "openmpi 5": "mpiexec (Open MPI) 5.0.11",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n",
    "old mpich": "HYDRA build details:\n    Version:                                 3.2\n",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005",
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return tmp_path / "python"


def tells(python: Path, library: Path, flavour: str) -> str:
    """Write a Python whose mpi4py would load `library`."""
    return script(python, json.dumps({"library": str(library), "version": VERSIONS[flavour]}))


def script(path: Path, output: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "library, flavour, launcher, says",
    [
        ("venv/lib/libmpi.so.12", "mpich", "venv/bin/mpiexec.hydra", "mpich"),
        ("usr/lib/x86_64-linux-gnu/libmpi.so.40", "openmpi", "usr/bin/mpiexec.openmpi", "openmpi"),
        ("usr/lib64/openmpi/lib/libmpi.so.40", "openmpi", "usr/lib64/openmpi/bin/mpiexec", "openmpi"),
        ("opt/intel/mpi/latest/lib/release/libmpi.so.12", "intel", "opt/intel/mpi/latest/bin/mpiexec.hydra", "intel"),
    ],
)
def test_the_launcher_beside_the_library(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch, library: str, flavour: str, launcher: str, says: str
) -> None:
    other = "mpich" if flavour == "openmpi" else "openmpi"
    script(tmp_path / "path" / "mpiexec", LAUNCHERS[other])
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    script(tmp_path / launcher, LAUNCHERS[says])
    found = find_mpiexec(tells(python, tmp_path / library, flavour))
    assert (found.path, found.flavour, found.library) == (tmp_path / launcher, flavour, tmp_path / library)


def test_a_foreign_launcher_in_the_same_folder_is_passed_by(tmp_path: Path, python: Path) -> None:
    script(tmp_path / "usr/bin/mpiexec", LAUNCHERS["mpich"])
    script(tmp_path / "usr/bin/orterun", LAUNCHERS["openmpi"])
    found = find_mpiexec(tells(python, tmp_path / "usr/lib/libmpi.so.40", "openmpi"))
    assert found.path.name == "orterun"


def test_on_path_flavour_and_version_must_agree(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tells(python, tmp_path / "lib/libmpi.so.12", "mpich")
    folders = [tmp_path / "old", tmp_path / "other", tmp_path / "right"]
    for folder, says in zip(folders, ("old mpich", "openmpi", "mpich"), strict=True):
        script(folder / "mpiexec", LAUNCHERS[says])
    monkeypatch.setenv("PATH", ":".join([*map(str, folders), os.environ["PATH"]]))
    assert find_mpiexec(asked).path == folders[2] / "mpiexec"
    monkeypatch.setenv("PATH", ":".join([*map(str, folders[:2]), "/usr/bin", "/bin"]))
    with pytest.raises(UsageError, match=r"no mpiexec belongs to .*mpich 5\.0\.2.*hpcdl\[mpich\]"):
        find_mpiexec(asked)


def test_no_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch, python: Path) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(UsageError, match="no MPI library can be loaded"):
        find_mpiexec()
    with pytest.raises(UsageError, match="cannot be loaded"):
        find_mpiexec(script(python, "no json"))
    with pytest.raises(UsageError, match="does not know"):
        find_mpiexec(script(python, json.dumps({"library": "/lib/libmpi.so", "version": "WeirdMPI 1"})))


def test_the_real_one_starts_its_own_library() -> None:
    """The real mpiexec starts its own library on this host, even inside a scheduler's job on other nodes."""
    found = find_mpiexec()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2",
             "SLURM_NODELIST": "a,b", "SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
    code = "from hpcdl.comm.mpi.communicator import world; c = world(2); print(c.allgather_json(c.host)[1], end='')"
    finished = subprocess.run(
        [str(found.path), *launch_flags(found.flavour), "-n", "2", sys.executable, "-c", code],
        env=os.environ | slurm | dict(environment_for(found.flavour)), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == os.uname().nodename * 2


def test_only_open_mpi_needs_telling() -> None:
    assert environment_for("mpich") == {}
    reported = environment_for("openmpi")
    assert reported["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in reported) == (os.geteuid() == 0)

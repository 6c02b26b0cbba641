"""Starting MPI: the launcher and the library must match."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = "from hpcdl.comm.mpi.communicator import world; world(expected_size=3)"
WITHOUT_START = """
import hpcdl.comm.mpi.library as mpi
print(mpi.library_version())
print(mpi.import_mpi(initialize=False).Is_initialized())
"""


@pytest.mark.mpi
def test_jobs_of_one_rank_instead_of_one_job_are_noticed() -> None:
    finished = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=300)
    assert finished.returncode != 0
    assert "3 ranks were asked for but MPI started 1" in finished.stderr.splitlines()[-1]


@pytest.mark.mpi
def test_asking_for_the_version_starts_nothing() -> None:
    line = [sys.executable, "-c", WITHOUT_START]
    finished = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    *version, started = finished.stdout.strip().splitlines()
    assert started == "False" and version


def test_importing_the_module_imports_no_mpi() -> None:
    line = [sys.executable, "-c", "import sys, hpcdl.comm.mpi.communicator; print('mpi4py' in sys.modules)"]
    finished = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    assert finished.stdout.strip() == "False"


def test_who_asks_for_the_library_waits_for_no_numpy() -> None:
    line = [sys.executable, "-c", "import sys, hpcdl.comm.mpi.library; print('numpy' in sys.modules)"]
    finished = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    assert finished.stdout.strip() == "False"


def test_no_library_is_one_line_with_the_remedy() -> None:
    environment = os.environ | {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    line = [sys.executable, "-m", "hpcdl.comm.mpi.library"]
    finished = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "no MPI library can be loaded" in finished.stdout and "hpcdl[mpich]" in finished.stdout

"""What the tests of training share: the MPIs that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcdl.cluster.launchers.mpiexec import Mpiexec, environment_for, find_mpiexec, launch_flags
from tests.conftest import CommandLine
from tests.lab.needs import DEBIAN_OPEN_MPI
from tests.training.training_runs import NOTED, images_of


@dataclass(frozen=True)
class Mpi:
    """An MPI, and the command line on it."""

    mpiexec: Mpiexec
    hpcdl: CommandLine

    @property
    def launcher(self) -> list[str]:
        """Its mpiexec, on this node only; `-n N COMMAND` follows."""
        return [str(self.mpiexec.path), *launch_flags(self.mpiexec.flavour)]

    @property
    def environment(self) -> dict[str, str]:
        """What ranks need that it starts directly."""
        return self.hpcdl.environment | dict(environment_for(self.mpiexec.flavour))


@dataclass(frozen=True)
class Undisturbed:
    """A deterministic run of planted.py that nobody stopped, and the images that each rank took at each step."""

    run_dir: Path
    images: dict[tuple[int, int], list[int]]


@pytest.fixture(scope="session")
def undisturbed(session_hpcdl: CommandLine, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What runs that were disturbed are held against. Read only."""
    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*NOTED, "--data", shards, "--run-dir", folder / "run"]
    finished = session_hpcdl(arguments, env={"RECORD_DIR": str(folder)}, timeout_s=300)
    assert finished.code == 0, finished.err
    return Undisturbed(folder / "run", images_of(folder))


IN_LAB = pytest.mark.lab("open-mpi")
EITHER = pytest.mark.parametrize("mpi", ["default", pytest.param("openmpi", marks=IN_LAB)], indirect=True)
"""For tests of what the two MPIs do differently; the others run on Open MPI in the long version."""


@pytest.fixture(scope="module", params=["default", pytest.param("openmpi", marks=[IN_LAB, pytest.mark.soak])])
def mpi(request: pytest.FixtureRequest, session_hpcdl: CommandLine) -> Iterator[Mpi]:
    """The MPI that mpi4py finds by itself, and Debian's Open MPI."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "openmpi":
            patch.setenv("MPI4PY_LIBMPI", str(DEBIAN_OPEN_MPI))
        yield Mpi(find_mpiexec(), CommandLine(session_hpcdl.home))

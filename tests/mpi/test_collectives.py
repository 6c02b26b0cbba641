"""Every all-reduce on real MPI ranks, under each MPI that is installed; all of one rank count inside one mpiexec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcdl.cluster.launchers.mpiexec import Mpiexec, environment_for, find_mpiexec, launch_flags
from hpcdl.collectives.table import COLLECTIVES
from tests.lab.needs import DEBIAN_OPEN_MPI

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("allreduce_ranks.py")


@pytest.fixture(scope="module", params=["default", pytest.param("openmpi", marks=pytest.mark.lab("open-mpi"))])
def mpiexec(request: pytest.FixtureRequest) -> Any:
    """The MPI that mpi4py finds by default, and Debian's Open MPI."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "openmpi":
            patch.setenv("MPI4PY_LIBMPI", str(DEBIAN_OPEN_MPI))
        yield find_mpiexec()


def command(mpiexec: Mpiexec, num_ranks: int, *arguments: str) -> tuple[list[str], dict[str, str]]:
    flags = launch_flags(mpiexec.flavour)
    line = [str(mpiexec.path), *flags, "-n", str(num_ranks), sys.executable, str(PROGRAM), *arguments]
    return line, os.environ | dict(environment_for(mpiexec.flavour))


CASES = [("one_node", name) for name in COLLECTIVES] + [("two_nodes", "hierarchical")]


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(
    request: pytest.FixtureRequest, mpiexec: Mpiexec, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank found, with all algorithms inside one mpiexec."""
    folder = tmp_path_factory.mktemp("results")
    line, environment = command(mpiexec, request.param, str(folder / "result.json"))
    environment["XDG_CACHE_HOME"] = str(folder)
    finished = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    found: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    assert len(found) == request.param
    return found


@pytest.mark.parametrize(("nodes", "name"), CASES)
def test_sums_are_right_and_the_same_everywhere(results: list[dict[str, Any]], nodes: str, name: str) -> None:
    found = [result[nodes][name] for result in results]
    assert len({each["digest"] for each in found}) == 1, "ranks differ"
    # Sums of numbers below 1: each of size - 1 additions rounds by half a unit in the last place of at most 4.
    assert found[0]["error"] <= 2 * len(results)
    assert found[0]["half_error"] <= 2 * len(results) * 2.0**-7


def test_what_a_communicator_promises(mpiexec: Mpiexec, results: list[dict[str, Any]]) -> None:
    check_basics(mpiexec, [result["basics"] for result in results])


def check_basics(mpiexec: Mpiexec, results: list[dict[str, Any]]) -> None:
    size = len(results)
    for rank, result in enumerate(results):
        assert result["json"] == [{"rank": other, "text": "ü" * other} for other in range(size)]
        assert result["group"] == [other for other in reversed(range(size)) if other % 2 == rank % 2]
        assert result["shared"] == 3 * size * (size + 1) // 2
        assert result["broadcast"] and result["first_in_range"]
        assert result["library"].startswith({"mpich": "MPICH", "openmpi": "Open MPI"}[mpiexec.flavour])
        assert Path(result["library_path"]).samefile(mpiexec.library)


def test_a_killed_rank_ends_the_job(mpiexec: Mpiexec, tmp_path: Path) -> None:
    line, environment = command(mpiexec, 3, str(tmp_path / "result.json"), "dies")
    finished = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode != 0

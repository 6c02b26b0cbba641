"""The container of the recipe for Apptainer: built without Apptainer, run by bubblewrap the way Apptainer runs it.

The root is read-only, and mount points that it lacks are not created; home, /tmp and the working folder are the host's,
as are network, processes and environment. Built once, in some minutes, from Debian's and PyPI's packages.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcdl import __version__
from tests.conftest import ROOT, Finished, Mpi
from tests.lab.slurm import SlurmLab

pytestmark = [pytest.mark.soak, pytest.mark.lab("container")]

HOSTS_OWN = ("dev", "proc", "sys", "tmp")
WITH_ENVIRONMENT = '. /.singularity.d/env/90-environment.sh; exec "$@"'
TRAIN = ("train", "--model", "lenet", "--data", "synthetic:mnist", "--batch-size", "8", "--steps", "4")
DATA = ("--data", "synthetic:mnist", "--batch-size", "256")


@dataclass(frozen=True)
class Container:
    """The tree below `root`, run with `folder` as home and working folder; `flags` are more options of bubblewrap."""

    root: Path
    folder: Path
    flags: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def line(self, *command: str | Path) -> list[str]:
        """Return the words that run a command in it."""
        words = ["bwrap", *self.flags, "--tmpfs", "/"]
        for path in sorted(self.root.iterdir()):
            if path.is_symlink():
                words += ["--symlink", str(path.readlink()), f"/{path.name}"]
            elif path.name not in HOSTS_OWN:
                words += ["--ro-bind", str(path), f"/{path.name}"]
        words += ["--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc", "--ro-bind", "/sys", "/sys"]
        words += ["--bind", "/tmp", "/tmp", "--bind", str(self.folder), str(self.folder), "--remount-ro", "/"]
        words += ["--setenv", "HOME", str(self.folder), "--chdir", str(self.folder)]
        return [*words, "/bin/sh", "-c", WITH_ENVIRONMENT, "sh", *map(str, command)]

    def __call__(self, *command: str | Path, before: Sequence[str | Path] = ()) -> Finished:
        """Run a command, preceded by the words `before`, such as a launcher that starts one container for each rank."""
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **self.environment}
        line = [*map(str, before), *self.line(*command)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """The tree that the recipe creates; not below /tmp, where each of the lab's hosts has a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdl-container.", dir="/var/tmp"))
    folder.chmod(0o755)
    root = folder / "root"
    built = subprocess.run([ROOT / "scripts" / "container", root], capture_output=True, text=True, timeout=3000)
    try:
        assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
        yield root
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=True)


@pytest.fixture
def container(tree: Path, tmp_path: Path) -> Container:
    return Container(tree, tmp_path)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found


def test_the_recipes_own_test_passes_in_a_root_that_nobody_writes(container: Container) -> None:
    assert container("hpcdl", "--version").out.strip().endswith(__version__)
    assert container("/.singularity.d/runscript", "--version").out.strip().endswith(__version__)
    tested = container("/.singularity.d/test")
    assert tested.code == 0, tested.out + tested.err
    for place in ("/opt/hpcdl/x", "/x", "/usr/x"):
        assert "Read-only file system" in container("touch", place).err, place
    assert "/src" not in container("ls", "-d", "/src").out


def test_the_mpi_inside_trains_and_infers_on_two_ranks(container: Container) -> None:
    trained = container("hpcdl", *TRAIN, "--ranks", "2", "--run-dir", "run")
    assert trained.code == 0, trained.err
    assert (record(container.folder / "run")["ranks"], record(container.folder / "run")["status"]) == (2, "finished")
    inferred = container("hpcdl", "infer", "run", *DATA, "--out", "out", "--ranks", "2")
    assert inferred.code == 0, inferred.err
    assert record(container.folder / "out")["inference"]["num_computed"] > 0


@pytest.mark.parametrize("mpi", ["default"], indirect=True)
@pytest.mark.parametrize("flags", [(), ("--unshare-user",)], ids=["shared", "user namespaces"])
def test_mpich_outside_starts_a_container_for_each_rank(
    tree: Path, tmp_path: Path, mpi: Mpi, flags: Sequence[str]
) -> None:
    """MPICH outside starts a container for each rank, also with user namespaces, as Apptainer without setuid does."""
    container = Container(tree, tmp_path, flags)
    done = container("hpcdl", *TRAIN, "--run-dir", "run", before=[*mpi.launcher, "-n", "2"])
    assert done.code == 0, done.err
    found = record(tmp_path / "run")
    assert (found["ranks"], found["status"], found["strategy"]) == (2, "finished", "ring")


@pytest.mark.lab("open-mpi")
def test_open_mpi_outside_does_not_start_the_mpich_inside(container: Container) -> None:
    """Open MPI outside speaks PMIx, but the recipe's MPICH does not: the run fails before anything is written."""
    launcher = ["mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = container("hpcdl", *TRAIN, "--run-dir", "run", before=launcher)
    assert done.code != 0 and "unsupported PMI version PMIx" in done.err, done.err
    assert not (container.folder / "run").exists()


def test_srun_starts_a_container_for_each_rank_on_two_nodes(tree: Path, lab_slurm: SlurmLab) -> None:
    """srun starts containers on two nodes for training and inference, by the MPICH inside over Slurm's PMI 2."""
    folder = lab_slurm.shared / "contained"
    folder.mkdir()
    container = Container(tree, folder)
    for words in ((*TRAIN, "--run-dir", "run"), ("infer", "run", *DATA, "--out", "out")):
        line = ["srun", "-K1", "-N2", "--ntasks-per-node=1", "--mpi=pmi2", *container.line("hpcdl", *words)]
        done = lab_slurm.run(line, cwd=folder, timeout_s=600)
        assert done.code == 0, done.err
    for name in ("run", "out"):
        found = record(folder / name)
        assert (found["ranks"], found["nodes"], found["status"]) == (2, 2, "finished")

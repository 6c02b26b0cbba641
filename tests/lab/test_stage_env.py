"""--stage-env on several nodes: packed once, unpacked by each node onto its own storage, and removed afterwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab.desk import Desk
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab

# Each rank records which Python runs it and where it found the module beside this one.
MODEL = """
import json, os, pathlib, sys
import keras
import only_here

def build(num_classes, input_shape):
    place = {"prefix": sys.prefix, "sibling": only_here.__file__, "host": os.uname().nodename}
    pathlib.Path(f"where-{os.uname().nodename}.json").write_text(json.dumps(place))
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
"""


def small_environment(folder: Path) -> Path:
    """Return a virtual environment that borrows TensorFlow and the rest from this one, and has a module of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    (packages / "only_here.py").write_text("")
    return folder


def test_each_node_runs_from_its_own_copy(lab_slurm: SlurmLab) -> None:
    folder = lab_slurm.shared / "stage"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    python = small_environment(folder / "venv") / "bin" / "python"
    mpi = {"MPI4PY_LIBMPI": str(Path(sysconfig.get_path("data")) / "lib" / "libmpi.so.12")}
    desk = Desk(lab_slurm, folder, mpi, python=str(python))
    words = ("--nodes", "2", "--time", "10m", "--stage-env", "--", "--model", "model.py:build")
    more = ("--data", "synthetic:cifar10", "--batch-size", "8", "--steps", "2")
    number = desk.submit(*words, *more, run="staged")
    job = lab_slurm.wait_for_job(number, timeout_s=300)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    assert "for itself" not in desk.log(number)  # one node reads, the other receives it over MPI
    prefixes = set()
    for node in ("node1", "node2"):
        place = json.loads((folder / f"where-{node}.json").read_text())
        prefixes.add(place["prefix"])
        assert place["prefix"].startswith(f"/tmp/hpcdl-env-root-{number}-0-"), place
        assert place["sibling"].startswith(f"{place['prefix']}/lib/"), place
        left = lab_slurm.run(["ls", "/tmp"], host=node).out
        assert "hpcdl-env" not in left, left
    assert len(prefixes) == 1
    assert "hpcdl-env" not in lab_slurm.run(["ls", "/tmp"], host="node3").out
    assert len(list((folder / "cache" / "hpcdl" / "environments").iterdir())) == 1
    lab_slurm.cancel_all()


def test_a_node_without_room_is_named(lab_slurm: SlurmLab) -> None:
    """A node's full storage is named: the job ends before a rank starts, and nothing stays on either node."""
    folder = lab_slurm.shared / "full"
    folder.mkdir()
    python = small_environment(folder / "venv") / "bin" / "python"
    mpi = {"MPI4PY_LIBMPI": str(Path(sysconfig.get_path("data")) / "lib" / "libmpi.so.12")}
    desk = Desk(lab_slurm, folder, {**mpi, "HPCDL_NODE_STORAGE": "/tmp/own"}, python=str(python))
    lab_slurm.change("mkdir /tmp/own", host="node1")
    full = ("node2", "node3", "node4")  # of any two nodes that the job may get, one has no space
    for node in full:
        lab_slurm.change("mkdir /tmp/own; mount -t tmpfs -o size=4k tmpfs /tmp/own", host=node)
    words = ("--nodes", "2", "--time", "10m", "--stage-env", "--", "--model", "lenet")
    number = desk.submit(*words, "--data", "synthetic:cifar10", "--batch-size", "8", "--steps", "2", run="full")
    job = lab_slurm.wait_for_job(number, timeout_s=300)
    assert job["JobState"] == "FAILED" and job["ExitCode"] == "1:0", desk.log(number)
    reported = r"^hpcdl: --stage-env: node node[234]: tar: .* \(0 free in /tmp/own\)$"
    assert re.search(reported, desk.log(number), re.MULTILINE), desk.log(number)
    for node in ("node1", *full):
        assert lab_slurm.run(["ls", "/tmp/own"], host=node).out == ""
    for node in full:
        lab_slurm.change("umount /tmp/own", host=node)
    for node in ("node1", *full):
        lab_slurm.change("rmdir /tmp/own", host=node)
    lab_slurm.cancel_all()

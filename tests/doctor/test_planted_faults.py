"""Ten planted faults, as real as this machine allows, are each named by their check."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdl.cluster.launchers.mpiexec import Mpiexec
from hpcdl.doctor import accelerators, installation, mpi, node, scheduler, storage
from hpcdl.doctor.table import CHECKS, FAILURE, OK, WARNING, Finding, Subject, examine
from tests.conftest import CommandLine, patience


def program(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def only(found: list[Finding], level: str) -> Finding:
    chosen = [finding for finding in found if finding.level == level]
    assert len(chosen) == 1, found
    assert chosen[0].remedy
    return chosen[0]


def on_path(tmp_path: Path) -> dict[str, str]:
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_wrong_pmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "sbatch", "exit 1")
    program(tmp_path / "bin", "srun", "printf 'MPI plugin types are...\\n\\tnone\\n\\tcray_shasta\\n'")
    for name, value in on_path(tmp_path).items():
        monkeypatch.setenv(name, value)
    finding = only(scheduler.check_scheduler(Subject(environment=on_path(tmp_path))), FAILURE)
    assert "needs srun --mpi=pm" in finding.text and "cray_shasta, none" in finding.text


def test_a_pmi_that_the_user_forces_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "sbatch", "exit 1")
    program(tmp_path / "bin", "srun", "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tpmix\\n'")
    monkeypatch.setenv("PATH", on_path(tmp_path)["PATH"])
    finding = only(
        scheduler.check_scheduler(Subject(environment={**on_path(tmp_path), "HPCDL_SRUN_MPI": "none"})), FAILURE
    )
    assert "HPCDL_SRUN_MPI=none" in finding.text and "unset" in finding.remedy
    good = scheduler.check_scheduler(Subject(environment=on_path(tmp_path)))
    assert {finding.level for finding in good} == {"ok"}


@pytest.mark.mpi
def test_mismatched_mpiexec(tmp_path: Path) -> None:
    program(tmp_path / "bin", "mpiexec", "echo 'mpiexec (OpenRTE) 9.9.9'")
    found = mpi.check_mpi(Subject(environment=on_path(tmp_path)))
    finding = only([one for one in found if "on PATH" in one.text], WARNING)
    assert str(tmp_path / "bin" / "mpiexec") in finding.text and "9.9.9" in finding.text
    assert any("two ranks talk" in one.text for one in found), found


@pytest.mark.parametrize(
    ("flavour", "version", "level", "reported"),
    [
        ("openmpi", "4.1.4", WARNING, "openmpi 4.1.4 has no one-sided windows over TCP"),
        ("mpich", "5.0.2", "ok", "MPIR_CVAR_ASYNC_PROGRESS=1 changes that"),
    ],
)
def test_windows_between_nodes(flavour: str, version: str, level: str, reported: str) -> None:
    mpiexec = Mpiexec(path=Path("mpiexec"), flavour=flavour, library=Path("libmpi.so"), version=version)
    (finding,) = mpi._one_sided(mpiexec, {})
    assert finding.level == level and reported in finding.text
    newer = Mpiexec(path=Path("mpiexec"), flavour="openmpi", library=Path("libmpi.so"), version="5.0.11")
    assert mpi._one_sided(newer, {}) == []
    asked = Mpiexec(path=Path("mpiexec"), flavour="mpich", library=Path("libmpi.so"), version="5.0.2")
    assert mpi._one_sided(asked, {"MPIR_CVAR_ASYNC_PROGRESS": "1"}) == []


def test_an_mpi_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    finding = only(mpi.check_mpi(Subject()), FAILURE)
    assert "no MPI library can be loaded" in finding.text and "hpcdl[mpich]" in finding.remedy


def test_one_core_mask() -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("this machine has one core")
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from hpcdl.doctor import node; from hpcdl.doctor.table import Subject\n"
        "print(*[(f.level, f.text) for f in node.check_affinity(Subject(environment={}))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    assert "warning" in out and "would share one core" in out


def test_a_mask_smaller_than_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    finding = only(node.check_affinity(Subject(environment={"SLURM_CPUS_ON_NODE": "64"})), WARNING)
    assert "the job was given 64" in finding.text and "--cpu-bind=none" in finding.remedy


def usage(free: int) -> Callable[..., Any]:
    return lambda path: shutil._ntuple_diskusage(free, 0, free)  # type: ignore[attr-defined]


def test_full_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(environment={"TMPDIR": str(tmp_path)})
    assert storage.check_scratch(subject)[0].level != FAILURE
    monkeypatch.setattr(shutil, "disk_usage", usage(1024))
    finding = only(storage.check_scratch(subject), FAILURE)
    assert str(tmp_path) in finding.text and "it is full" in finding.text


def test_no_space_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(storage.check_shared_memory(Subject(shared_memory=tmp_path / "none")), FAILURE)
    monkeypatch.setattr(shutil, "disk_usage", usage(1024**2))
    finding = only(storage.check_shared_memory(Subject(shared_memory=tmp_path)), FAILURE)
    assert "1 MiB free" in finding.text


def test_locking_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(environment={}, working=tmp_path)
    assert [finding.level for finding in storage.check_locking(subject)] == ["ok"]

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    finding = only(storage.check_locking(subject), FAILURE)
    assert "refuses locks" in finding.text and "HDF5_USE_FILE_LOCKING=FALSE" in finding.remedy
    aware = Subject(environment={"HDF5_USE_FILE_LOCKING": "FALSE"}, working=tmp_path)
    assert [finding.level for finding in storage.check_locking(aware)] == ["ok"]
    (untried,) = storage.check_locking(Subject(environment={}, working=Path("/proc")))  # nobody makes a file there
    assert untried.level == "warning" and "locks were not tried" in untried.text


def test_bad_site_settings(ask_hpcdl: CommandLine) -> None:
    (ask_hpcdl.home / "site.toml").write_text("[train]\nbatch-sise = 64\n")
    finished = ask_hpcdl(["doctor", "--only", "config", "--json"])
    assert finished.code == 1
    finding = finished.json()["findings"][0]
    assert finding["level"] == "failure" and "batch-sise" in finding["text"] and "batch-size" in finding["text"]
    (ask_hpcdl.home / "site.toml").write_text('[submit]\npartitoin = "normal"\n')
    reported = ask_hpcdl(["doctor", "--only", "config"])
    assert reported.code == 1 and "did you mean 'partition'" in reported.out
    (ask_hpcdl.home / "site.toml").write_text("[train\n")
    finished = ask_hpcdl(["doctor", "--only", "config"])
    assert finished.code == 1 and "site.toml" in finished.out and "FAILURE" in finished.out
    (ask_hpcdl.home / "site.toml").write_text("[train]\nbatch-size = 64\n")
    assert ask_hpcdl(["doctor", "--only", "config"]).code == 0


def test_missing_module(tmp_path: Path) -> None:
    gone = only(installation.check_module(Subject(environment={"HPCDL_ROOT": str(tmp_path / "gone")})), FAILURE)
    assert "does not exist" in gone.text
    (tmp_path / "install.json").write_text(json.dumps({"version": "1.0", "mpi_module": "openmpi/4.1"}))
    loaded = {"HPCDL_ROOT": str(tmp_path), "LOADEDMODULES": "gcc/12:hpcdl/1.0"}
    finding = only(installation.check_module(Subject(environment=loaded)), FAILURE)
    assert "openmpi/4.1" in finding.text and "module load openmpi/4.1" in finding.remedy
    loaded["LOADEDMODULES"] += ":openmpi/4.1"
    assert not [one for one in installation.check_module(Subject(environment=loaded)) if one.level == FAILURE]


def test_oversubscribed_threads() -> None:
    cpus = len(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": str(cpus), "SLURM_NTASKS_PER_NODE": "3"}
    found = [one for one in node.check_threads(Subject(environment=environment)) if "OMP_NUM_THREADS" in one.text]
    assert f"= {3 * cpus} threads on {cpus} CPUs" in only(found, WARNING).text
    assert [one.level for one in node.check_threads(Subject(environment={}))] == ["ok"]


def test_a_clock_that_is_off(tmp_path: Path) -> None:
    """A wrong clock is named: a fake srun answers for two hosts, the second one five seconds ahead."""
    body = 'now=$(date +%s); echo "clock n1 $(date +%s.%N)"; echo "clock n2 $((now + 5)).900000000"'
    program(tmp_path / "bin", "srun", body)
    job = {**on_path(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    finding = only(scheduler.check_clocks(Subject(environment=job)), FAILURE)
    assert "the clock of n2 is ahead by" in finding.text
    program(tmp_path / "bin", "srun", 'for host in n1 n2; do echo "clock $host $(date +%s.%N)"; done')
    assert [one.level for one in scheduler.check_clocks(Subject(environment=job))] == ["ok"]


def test_what_the_asking_took_is_no_fault() -> None:
    assert scheduler.off_by(100.0, 90.0, 110.0) == 0.0
    assert scheduler.off_by(115.0, 90.0, 110.0) == 5.0
    assert scheduler.off_by(80.0, 90.0, 110.0) == -10.0


def test_a_sound_node_passes_in_time(run_hpcdl: CommandLine) -> None:
    began = time.monotonic()
    finished = run_hpcdl(["doctor", "--json"])
    assert time.monotonic() - began < patience(60)
    found = finished.json()
    failures = [finding for finding in found["findings"] if finding["level"] == "failure"]
    assert (finished.code, failures) == (0, [])
    checks = {finding["check"] for finding in found["findings"]}
    assert {"python", "mpi", "scheduler", "affinity", "locking", "storage", "limits", "clocks"} <= checks


H200 = "NVIDIA H200, 580.159.04, 143771 MiB, 0, Not Active, Not Active"
"""Output of nvidia-smi for the check's query on a node with one GPU."""


def gpu_node(tmp_path: Path, *rows: str, **variables: str) -> Subject:
    """Return a node whose driver answers with `rows`; TensorFlow is real and sees no GPU here."""
    program(tmp_path / "bin", "nvidia-smi", "\n".join(f"echo '{row}'" for row in rows))
    (tmp_path / "dev").mkdir()
    for index in range(len(rows)):
        (tmp_path / "dev" / f"nvidia{index}").touch()
    return Subject(environment={**os.environ, **on_path(tmp_path), **variables}, devices=tmp_path)


@pytest.mark.long
def test_a_node_whose_tensorflow_does_not_see_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = gpu_node(tmp_path, H200)
    monkeypatch.setenv("PATH", subject.environment["PATH"])
    found = accelerators.check_gpus(subject)
    assert found[0].text == "1 GPU: NVIDIA H200, 143771 MiB, driver 580.159.04"
    finding = only(found, WARNING)
    assert "runs here compute on the CPUs" in finding.text and "tensorflow[and-cuda]" in finding.remedy


@pytest.mark.long
def test_a_gpu_with_bad_memory_and_one_that_is_too_hot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, hot = H200.replace(", 0,", ", 3,"), H200.replace("Not Active", "Active", 1)
    subject = gpu_node(tmp_path, bad, hot, CUDA_VISIBLE_DEVICES="")
    monkeypatch.setenv("PATH", subject.environment["PATH"])
    warnings = [finding.text for finding in accelerators.check_gpus(subject) if finding.level == WARNING]
    assert warnings == [
        "GPU 0 has had 3 memory errors that ECC could not correct", "GPU 1 runs at a lower clock: hw_slowdown",
    ]  # fmt: skip


ISLANDS = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\tNODE\t0-23\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tSYS\tNODE\t0-23\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t24-47\t1\t\tN/A
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t24-47\t1\t\tN/A
NIC0\tNODE\tNODE\tSYS\tSYS\t X
"""
"""Output of `nvidia-smi topo -m` on a node with two pairs of GPUs, in the form of drivers 535 and later."""


@pytest.mark.parametrize(
    ("matrix", "reported"),
    [(ISLANDS, ["links between the GPUs: 4 x SYS, 2 x NV4"]), (ISLANDS.replace("GPU3", "G3"), [])],
)
def test_what_connects_gpus(matrix: str, reported: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = gpu_node(tmp_path, H200, H200, H200, H200, CUDA_VISIBLE_DEVICES="")
    (tmp_path / "matrix").write_text(matrix)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(
        smi.read_text().replace("#!/bin/bash", f'#!/bin/bash\n[ "$1" = topo ] && exec cat {tmp_path}/matrix')
    )
    monkeypatch.setenv("PATH", subject.environment["PATH"])
    monkeypatch.setattr(accelerators, "_seen", lambda *_: [])
    texts = [finding.text for finding in accelerators.check_gpus(subject)]
    assert texts == ["4 GPUs: NVIDIA H200, 143771 MiB, driver 580.159.04", *reported]


@pytest.mark.long
def test_a_node_whose_driver_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = gpu_node(tmp_path, H200, CUDA_VISIBLE_DEVICES="")
    program(tmp_path / "bin", "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    monkeypatch.setenv("PATH", subject.environment["PATH"])
    finding = only(accelerators.check_gpus(subject), WARNING)
    assert finding.text == "this node has 1 GPU, but nvidia-smi does not answer"


AMD = {
    "card0": {"Card series": "AMD Instinct MI250X", "VRAM Total Memory (B)": "68702699520"},
    "card1": {"Card series": "AMD Instinct MI250X", "VRAM Total Memory (B)": "68702699520"},
    "system": {"Driver version": "6.3.6"},
}
"""Output of `rocm-smi --showproductname --showmeminfo vram --showdriverversion --json`, as seen from ROCm 5 and 6."""


@pytest.mark.long
@pytest.mark.parametrize(("answer", "reported"), [
    (json.dumps(AMD), (OK, "2 GPUs: AMD Instinct MI250X, 65520 MiB, driver 6.3.6")),
    ("ERROR: no driver", (WARNING, "this node has 2 GPUs, but rocm-smi does not answer")),
])  # fmt: skip
def test_a_node_with_amds_gpus(
    answer: str, reported: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD GPUs known to the kernel are found; TensorFlow is real and not built for them."""
    for name, number in (("0", "0"), ("1", "4711"), ("2", "4712")):
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / name
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{number}\n")
    program(tmp_path / "bin", "rocm-smi", f"echo '{answer}'")
    subject = Subject(environment={**os.environ, **on_path(tmp_path)}, devices=tmp_path)
    monkeypatch.setenv("PATH", subject.environment["PATH"])
    first, seen = accelerators.check_gpus(subject)
    assert (first.level, first.text) == reported
    assert seen.level == WARNING and "is built without ROCm: runs here compute on the CPUs" in seen.text
    assert seen.remedy == "load the site's TensorFlow for AMD's GPUs"


def test_an_unknown_check_is_named(ask_hpcdl: CommandLine) -> None:
    finished = ask_hpcdl(["doctor", "--only", "clok"])
    assert finished.code == 2 and "'clocks'" in finished.err


@pytest.mark.mpi
@pytest.mark.parametrize("name", CHECKS)
def test_every_check_answers_and_says_what_to_do(name: str, tmp_path: Path) -> None:
    found = examine(Subject(environment=dict(os.environ), shared_memory=tmp_path), [name])
    assert found and {finding.check for finding in found} == {name}
    for finding in found:
        assert finding.level in (OK, WARNING, FAILURE) and finding.text and "\n" not in finding.text
        assert finding.remedy or finding.level == OK
        assert "the check itself broke" not in finding.text

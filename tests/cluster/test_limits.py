"""Limits of a node are named before ranks start: open files, shared memory, the temporary folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CommandLine, patience
from tests.lab.needs import DEBIAN_OPEN_MPI

TRAIN = "train --model lenet --data synthetic:mnist@200 --ranks 2 --steps 2 --profile none --run-dir run"
IN_MOUNTS = ["unshare", "-m"]


def train(command: CommandLine, before: str, cwd: Path, *, words: str = TRAIN, **env: str) -> tuple[int, str]:
    """Train after a line of bash, in a private mount namespace if the line mounts something."""
    line = f"{before} && exec {sys.executable} -P -m hpcdl {words}"
    prefix = IN_MOUNTS if "mount" in before else []
    done = subprocess.run(
        [*prefix, "bash", "-c", line],
        cwd=cwd,
        env=command.environment | env,
        capture_output=True,
        timeout=patience(300),
    )
    return done.returncode, done.stderr.decode()


def test_too_few_open_files_are_named_and_a_soft_limit_is_raised(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    code, err = train(session_hpcdl, "ulimit -n 64", tmp_path)
    assert code == 2 and err.startswith("hpcdl: only 64 files may be open at once") and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    code, err = train(session_hpcdl, "ulimit -Sn 64", tmp_path, words=TRAIN.replace("--ranks 2", "--ranks 1"))
    assert code == 0, err


@pytest.mark.lab("mounts")
@pytest.mark.parametrize(
    ("options", "why"), [("ro,size=1g", "is read-only"), ("size=4k", "has 4 KiB free"), ("size=16m", "has 16 MiB free")]
)
def test_too_little_shared_memory_is_named(
    options: str, why: str, session_hpcdl: CommandLine, tmp_path: Path
) -> None:  # fmt: skip
    code, err = train(session_hpcdl, f"mount -t tmpfs -o {options} tmpfs /dev/shm", tmp_path)
    assert code == 2 and err.startswith("hpcdl: /dev/shm on ") and why in err and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.lab("mounts", "open-mpi")
def test_a_full_temporary_folder_is_named_under_open_mpi(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    full = "mount -t tmpfs -o size=16k tmpfs tmp && ! cat /dev/zero 2>/dev/null >tmp/ballast"
    env = {"TMPDIR": str(tmp_path / "tmp"), "MPI4PY_LIBMPI": str(DEBIAN_OPEN_MPI)}
    code, err = train(session_hpcdl, full, tmp_path, **env)
    assert code == 2 and "cannot be written: No space left on device; clear it, or set TMPDIR" in err, err

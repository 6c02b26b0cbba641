"""Separate environments for peers, each built once: Horovod builds with TensorFlow 2.12 at most."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcdl.core.errors import HpcdlError, UsageError

HOROVOD, TENSORFLOW = "horovod==0.28.1", "tensorflow-cpu==2.12.1"
FIRST = ("setuptools<70", "wheel", "packaging", "numpy<1.24", TENSORFLOW)
"""Packages that Horovod's setup imports, in the newest versions that it works with."""
PYTORCH = "torch==2.13.0"
"""pip takes a CPU-only wheel, `2.13.0+cpu`, if its indexes and --find-links have one."""
WITH_PYTORCH = ("numpy", PYTORCH)
PYTHON = "python3.11"
"""The newest version with wheels of TensorFlow 2.12."""
COMPILERS = ("g++", "make", "cmake", "mpicxx", "mpiexec")
SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1", "HOROVOD_WITHOUT_MXNET": "1",
}  # fmt: skip
WITHOUT_HOROVOD = "or leave Horovod out: --engines ring,auto,grpc-ring,mpi-loop,pytorch-ddp"
WITHOUT_PYTORCH = "or leave PyTorch out: --engines ring,auto,grpc-ring,mpi-loop,horovod"
HAS_GLOO = "import torch.distributed; assert torch.distributed.is_gloo_available()"


def with_horovod(folder: Path, environment: dict[str, str], otherwise: str = WITHOUT_HOROVOD) -> Path:
    """Return Python of the environment in `folder`, made if incomplete; `environment`'s PATH has the compilers.

    Raises UsageError if a program is missing, HpcdlError if packages are unavailable or Horovod does not build.
    """
    path = environment.get("PATH", "")
    missing = [name for name in (PYTHON, *COMPILERS) if not shutil.which(name, path=path)]
    if missing:
        raise UsageError(
            f"Horovod is built from source, and these are not on PATH: {', '.join(missing)}; on Debian 12: "
            f"sudo apt-get install python3-venv g++ make cmake libopenmpi-dev openmpi-bin, {otherwise}"
        )
    python = folder / "bin" / "python"
    if _answers([str(python), "-c", "import horovod.tensorflow"], environment):
        return python
    print(f"hpcdl: building {HOROVOD} in {folder} (some minutes, once)", file=sys.stderr, flush=True)
    _done([PYTHON, "-m", "venv", "--clear", str(folder)], environment, "venv", otherwise)
    _install(python, FIRST, environment, otherwise)
    # Its setup looks for cmake and the compilers on PATH, and for TensorFlow in this environment. A wheel
    # of it in pip's cache may have been built with another MPI.
    building = {**environment, **SETTINGS, "PATH": f"{python.parent}:{path}"}
    _install(python, ("--no-build-isolation", "--no-cache-dir", HOROVOD), building, otherwise)
    if not _answers([str(python), "-c", "import horovod.tensorflow"], environment):
        raise HpcdlError(f"{HOROVOD} was built, but does not load in {folder}; {otherwise}")
    return python


def with_pytorch(folder: Path, environment: dict[str, str], otherwise: str = WITHOUT_PYTORCH) -> Path:
    """Return Python of the environment in `folder`, made if incomplete.

    Raises UsageError if that Python is missing, HpcdlError if PyTorch is unavailable or does not load.
    """
    if not shutil.which(PYTHON, path=environment.get("PATH", "")):
        raise UsageError(f"PyTorch gets an environment of {PYTHON}, which is not on PATH; {otherwise}")
    python = folder / "bin" / "python"
    if _answers([str(python), "-c", HAS_GLOO], environment):
        return python
    print(f"hpcdl: installing {PYTORCH} in {folder} (a minute or two, once)", file=sys.stderr, flush=True)
    _done([PYTHON, "-m", "venv", "--clear", str(folder)], environment, "venv", otherwise)
    _install(python, WITH_PYTORCH, environment, otherwise)
    if not _answers([str(python), "-c", HAS_GLOO], environment):
        raise HpcdlError(f"{PYTORCH} was installed, but does not load with gloo in {folder}; {otherwise}")
    return python


def version_of(python: Path, package: str, environment: Mapping[str, str]) -> str:
    """Return the installed version of a package, such as 2.13.0+cpu."""
    line = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def _install(python: Path, what: tuple[str, ...], environment: dict[str, str], otherwise: str) -> None:
    line = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--retries", "1", *what]
    _done(line, environment, f"pip, which needs a network for {what[-1]},", otherwise)


def _done(line: list[str], environment: dict[str, str], who: str, otherwise: str) -> None:
    finished = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        told = [text for text in finished.stderr.splitlines() if text.strip()] or [f"exit code {finished.returncode}"]
        errors = [text for text in told if text.startswith("ERROR")] or told[-1:]
        raise HpcdlError(f"{who} failed: {errors[0]}; {otherwise}")


def _answers(line: list[str], environment: dict[str, str]) -> bool:
    try:
        return subprocess.run(line, env=environment, capture_output=True, check=False).returncode == 0
    except OSError:
        return False

"""How the tests here run scripts: some ranks under the MPI that mpi4py loads, or one process without a launcher."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from tests.conftest import ROOT, CommandLine, Finished, finish

HERE = Path(__file__).parent


def run_script(
    hpcdl: CommandLine, script: Path, *arguments: str | Path, ranks: int, cwd: Path, timeout_s: float = 300.0
) -> Finished:
    """Run `script ARGUMENTS` on so many ranks, in a folder of its own."""
    mpiexec = find_mpiexec()
    launcher = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", str(ranks)] if ranks > 1 else []
    process = subprocess.Popen(
        [*launcher, sys.executable, str(script), *map(str, arguments)],
        cwd=cwd,
        env=hpcdl.environment
        | dict(environment_for(mpiexec.flavour))
        | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return finish(process, timeout_s)


def succeed(finished: Finished) -> Finished:
    """`finished`, where it ended with 0."""
    if finished.code != 0:
        pytest.fail(f"exit {finished.code}\n{finished.out[-3000:]}\n{finished.err[-6000:]}", pytrace=False)
    return finished


def cases_of(file: str) -> Sequence[str]:
    """The names of the `case_*` functions of a script here, which imports TensorFlow and is not imported itself."""
    return re.findall(r"^def (case_\w+)", (HERE / file).read_text(), re.MULTILINE)

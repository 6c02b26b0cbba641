"""How the tests here run scripts: on ranks under the MPI that mpi4py loads, or in one process without a launcher."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from tests.conftest import ROOT, CommandLine, Finished, finish

HERE = Path(__file__).parent


def run_script(
    hpcdl: CommandLine, script: Path, *arguments: str | Path, ranks: int, cwd: Path, timeout_s: float = 300.0
) -> Finished:
    """Run `script ARGUMENTS` on `ranks` ranks, in a folder of its own."""
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
    """Return `finished`; fail the test if its exit code is not 0."""
    if finished.code != 0:
        pytest.fail(f"exit {finished.code}\n{finished.out[-3000:]}\n{finished.err[-6000:]}", pytrace=False)
    return finished


def cases_of(file: str, pattern: str = r"^def (case_\w+)") -> list[str]:
    """Return the names of the case functions in a script here, which imports TensorFlow and is not imported itself."""
    return re.findall(pattern, (HERE / file).read_text(), re.MULTILINE)


def keys_of(file: str, table: str) -> list[str]:
    """Return the keys of a dict at the top level of a script here."""
    for node in ast.parse((HERE / file).read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table and isinstance(node.value, ast.Dict):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError(f"{file} has no table {table}")

"""The tutorial's scripts, as printed: few lines differ, and two ranks equal one process with the whole batch."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from tests.conftest import ROOT
from tests.training_runs import weights_in

pytestmark = pytest.mark.mpi
EXAMPLES = ROOT / "share" / "hpcdl" / "examples"


HELD_OUT = re.compile(r"held out:\s*([01]\.\d+)")


def run(script: str, folder: Path, num_ranks: int, model: str, epochs: int) -> str:
    mpiexec = find_mpiexec()
    launcher = [str(mpiexec.path), "-n", str(num_ranks)] if num_ranks > 1 else []
    answer = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLES / script)],
        cwd=folder, capture_output=True, text=True,
        # Unbuffered, a line is written in pieces, which mix with another rank's.
        env={
            **os.environ, **environment_for(mpiexec.flavour), "TF_CPP_MIN_LOG_LEVEL": "3", "TF_DETERMINISTIC_OPS": "1",
            "EPOCHS": str(epochs), "MODEL": model, "PYTHONUNBUFFERED": "",
        },
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return answer.stdout


@pytest.fixture(scope="module")
def folder(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tutorial")
    (place / "shards").symlink_to(shards)
    return place


def test_at_most_five_lines_differ() -> None:
    before, after = ((EXAMPLES / f"keras_fit_{name}.py").read_text().splitlines() for name in ("before", "after"))
    changed = [
        line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:1] == "+" and line[:3] != "+++"
    ]
    assert 0 < len(changed) <= 5


@pytest.mark.soak
def test_two_ranks_equal_one_process(folder: Path) -> None:
    """Two ranks equal one process; `make test-all` shows it in keras/test_optimizers.py and keras/test_fit.py."""
    run("keras_fit_before.py", folder, 1, "one.keras", epochs=1)
    run("keras_fit_after.py", folder, 2, "two.keras", epochs=1)
    for one, two in zip(weights_in(folder / "one.keras"), weights_in(folder / "two.keras"), strict=True):
        assert numpy.abs(one - two).max() <= 1e-5 * max(numpy.abs(one).max(), 1e-30)
    is_plain_keras(folder / "two.keras")


@pytest.mark.soak
def test_two_ranks_learn_the_digits_and_the_model_is_plain_keras(folder: Path) -> None:
    output = run("keras_fit_after.py", folder, 2, "learnt.keras", epochs=15)
    found = [float(text) for text in HELD_OUT.findall(output)]
    assert len(found) == 2 and found[0] == found[1] >= 0.97, output
    is_plain_keras(folder / "learnt.keras")


def is_plain_keras(model: Path) -> None:
    """Assert that the model loads without hpcdl, with the optimizer that was wrapped."""
    code = (
        "import sys; sys.modules['hpcdl'] = None; import keras; "
        "model = keras.saving.load_model(sys.argv[1]); print(type(model.optimizer).__name__)"
    )
    answer = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "SGD"

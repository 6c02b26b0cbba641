"""Every command that trains refuses a Keras backend other than TensorFlow before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdl.core.paths import other_backend
from tests.conftest import CommandLine


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    "words",
    [
        ["run", "--ranks", "2", "--run-dir", "run", "script.py"],
        ["train", "--model", "lenet", "--data", "synthetic:mnist", "--ranks", "2", "--run-dir", "run"],
    ],
    ids=["run", "train"],
)
def test_a_command_ends_with_2_and_the_remedy(
    session_hpcdl: CommandLine, tmp_path: Path, words: list[str], backend: str
) -> None:
    (tmp_path / "script.py").write_text("print('began')")
    refused = session_hpcdl(words, cwd=tmp_path, env={"KERAS_BACKEND": backend})
    assert refused.code == 2 and "began" not in refused.out
    (line,) = refused.err.splitlines()
    assert f"KERAS_BACKEND={backend}" in line and line.endswith("set KERAS_BACKEND=tensorflow")
    assert not (tmp_path / "run").exists()


def test_a_script_that_chooses_another_itself_ends_with_2(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\nprint('on')")
    refused = session_hpcdl(["run", "--run-dir", "run", "script.py"], cwd=tmp_path)
    assert refused.code == 2 and "on" not in refused.out.split()
    assert "this script has Keras compute with jax" in refused.err


def test_the_doctor_names_it(session_hpcdl: CommandLine) -> None:
    found = session_hpcdl(["doctor"], env={"KERAS_BACKEND": "jax"})
    assert "KERAS_BACKEND=jax" in found.out and "set KERAS_BACKEND=tensorflow" in found.out


def test_keras_json_counts_below_the_variable(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "torch"}))
    home = {"KERAS_HOME": str(tmp_path)}
    assert "keras.json has the backend torch" in (other_backend(home) or "")
    assert other_backend({**home, "KERAS_BACKEND": "tensorflow"}) is None
    (tmp_path / "keras.json").write_text("{")
    assert other_backend(home) is None, "Keras passes over it"

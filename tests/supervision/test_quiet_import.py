"""A script imports TensorFlow and Keras without what their libraries print, and without what it may never use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAKE = "import os\nos.write(2, b'I0000 noise\\n')\nVERSION = 'fake'\n"
ANNOTATED = """
import sys, typing
first, second = (typing.ForwardRef("Any") for _ in range(2))
VERSION = first.__forward_code__ is second.__forward_code__ or sys.version_info >= (3, 14)  # compiles none from 3.14
"""
SCRIPT = """
import sys
from hpcdl.supervision.runtime import silence
silence()
print("before", file=sys.stderr, flush=True)
import tensorflow
print("after", tensorflow.VERSION, file=sys.stderr, flush=True)
import typing
assert not hasattr(typing, "compile")
"""


@pytest.mark.parametrize(
    ("body", "verbose", "reported"),
    [
        (FAKE, False, ["before", "after fake"]),
        (FAKE, True, ["before", "I0000 noise", "after fake"]),
        (ANNOTATED, False, ["before", "after True"]),
        (f"{FAKE}raise ImportError('no libcuda')\n", False, ["before", "ImportError: no libcuda"]),
    ],
)
def test_only_the_import_is_quiet(tmp_path: Path, body: str, verbose: bool, reported: list[str]) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(body)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    env = {"HPCDL_VERBOSE": "1"} if verbose else {}
    done = subprocess.run([sys.executable, "-c", start + SCRIPT], env=env, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith((" ", "Traceback"))] == reported, done.stderr


DRAWS = """
import gc, sys
from hpcdl.supervision.runtime import silence
silence()
import keras, numpy as np
assert gc.isenabled() and gc.get_freeze_count() > 100_000
assert not any(name.startswith("matplotlib") for name in sys.modules)
keras.visualization.plot_image_gallery(np.zeros((4, 8, 8, 3)), value_range=(0, 1), path=sys.argv[1])
boxes = sys.modules["keras.src.visualization.plot_bounding_box_gallery"]  # its function needs OpenCV too
assert boxes.patches.Patch(color="red").get_facecolor() == (1.0, 0.0, 0.0, 1.0)
"""


def test_keras_imports_matplotlib_when_it_first_draws(tmp_path: Path) -> None:
    path = tmp_path / "gallery.png"
    env = {"MPLBACKEND": "agg", "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", DRAWS, path], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and path.read_bytes().startswith(b"\x89PNG"), done.stderr


MAKES = """
import gc
from hpcdl.supervision.runtime import silence
silence()
import tensorflow as tf
first = tf.Variable(1.0)
import keras
assert any(one is first for one in gc.get_objects())
"""


def test_variables_made_before_keras_is_imported_are_found_later() -> None:
    """hpcdl.DistributedOptimizer makes all variables alike that the garbage collector knows."""
    done = subprocess.run([sys.executable, "-c", MAKES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""The names inside Keras that scripts and steps use exist in this Keras, and no other file uses more."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

FOUND = """
import keras
from hpcdl.step import keras_internals as internals
internals.check_internals()
oldest, newest = (tuple(map(int, one.split("."))) for one in internals.TESTED)
installed = tuple(map(int, keras.__version__.split(".")[:2]))
assert oldest <= installed <= newest, f"Keras {keras.__version__}: look at INTERNALS, then raise TESTED"
optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
optimizer.build(model.trainable_weights)
assert [one is two for one, two in zip(internals.trained_by(optimizer), model.trainable_weights, strict=True)]
assert len(internals.accumulators_of(optimizer)) == len(model.trainable_weights)
assert {one.name for _, one in internals.declared_fixed(model)} == {"moving_mean", "moving_variance"}
model.trainable = False
assert {one.name for _, one in internals.declared_fixed(model)} == {"moving_mean", "moving_variance"}
assert internals.rate_variable(optimizer) is not None and len(internals.layers_in(model)) >= 3
owner = next(one for one in keras.optimizers.Optimizer.__mro__ if "_clip_gradients" in vars(one))
delattr(owner, "_clip_gradients")
try:
    internals.check_internals()
except internals.UsageError as error:
    assert "_clip_gradients; use Keras 3" in str(error), error
else:
    raise AssertionError("nobody noticed")
print("all of them")
"""
PRIVATE = re.compile(r"(?:optimizer|model|layer|leaf|keras[\w.]*)\.(_[a-z]\w+)")


@pytest.mark.long
def test_the_installed_keras_has_every_name_and_one_that_lacks_any_is_refused() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", FOUND], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.stdout.splitlines()[-1:] == ["all of them"], finished.stderr[-3000:]


def test_no_other_file_of_scripts_or_step_reaches_into_keras() -> None:
    reached = {
        f"{path.name}: {name}"
        for room in ("scripts", "step")
        for path in (ROOT / "hpcdl" / room).rglob("*.py")
        if path.name != "keras_internals.py"
        for name in PRIVATE.findall(path.read_text())
        if name != "_unique_id"
    }
    assert reached == set()

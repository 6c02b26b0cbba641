"""Spans of layers are in order, unmeasurable layers have none, and recording changes no number."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpcdl.comm.observed import BACKWARD, FORWARD, LAYER_UPDATE
from tests.conftest import ROOT

STEPS = 4
LAYERS = {
    "chain": {"sequential/first", "sequential/norm", "sequential/second", "sequential/last"},
    "branches": {"stem", "left", "right", "shared", "rows/lstm_cell", "last"},
}
TOLD = {"chain": LAYERS["chain"], "branches": {"stem", "right", "last"}}
"""Layers with forward spans: not the left branch, unused by the right one, nor layers called twice or in a loop."""
CASES = [f"{name} {clock}" for name in ("chain 1", "branches 1", "chain 2") for clock in ("own", "python")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("layers") / "out.json"
    script = Path(__file__).with_name("layer_steps.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script), str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_layers_are_reported_and_no_number_changes(found: Any, case: str) -> None:
    assert found[case]["different"] == 0
    name, spans = case.partition(" ")[0], found[case]["spans"]
    expected = {FORWARD: TOLD[name], BACKWARD: LAYERS[name], LAYER_UPDATE: LAYERS[name]}
    for kind, layers in expected.items():
        assert Counter(span[1] for span in spans if span[0] == kind) == dict.fromkeys(layers, STEPS), kind
    backward = [span for span in spans if span[0] == BACKWARD]
    for step in range(STEPS):
        own = backward[step * len(LAYERS[name]) : (step + 1) * len(LAYERS[name])]
        assert all(begin <= end for _, _, begin, end in own)
        assert all(one[3] == other[2] for one, other in itertools.pairwise(own))
    if name == "chain":  # each layer ends as the next begins
        ahead = [span for span in spans if span[0] == FORWARD]
        assert [span[1].partition("/")[2] for span in ahead] == ["first", "norm", "second", "last"] * STEPS
        for step in range(STEPS):
            own = ahead[step * 4 : step * 4 + 4]
            assert all(one[3] == other[2] for one, other in itertools.pairwise(own))

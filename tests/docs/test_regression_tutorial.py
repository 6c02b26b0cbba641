"""The tutorial of a regression, run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, CommandLine

PAGE = ROOT / "docs" / "tutorials" / "regression.md"


@pytest.mark.mpi
def test_the_tutorial_learns_the_frequency(run_hpcdl: CommandLine) -> None:
    text = PAGE.read_text()
    made, network = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (run_hpcdl.home / "made.py").write_text(made)
    (run_hpcdl.home / "network.py").write_text(network)
    subprocess.run([sys.executable, "made.py"], cwd=run_hpcdl.home, check=True, timeout=120)
    commands = re.findall(r"^hpcdl (.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = run_hpcdl(command.split() + ["--json"] * command.startswith("evaluate"))
        assert done.code == 0, done.err
    assert done.json()["r2"] > 0.5

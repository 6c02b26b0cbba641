"""The tutorials on data other than pictures with one label run as written."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, CommandLine

TUTORIALS = ROOT / "docs" / "tutorials"
LEARNED = {
    "regression": ("r2", 0.5),
    "masks": ("iou", 0.8),
    "two-inputs": ("r2", 0.9),
    "text-classes": ("accuracy", 0.95),
}
"""The metric of held-out samples that `hpcdl evaluate` reports at the end of each, and its minimum."""
QUICK = ("masks",)
"""Pictures with masks; training/test_named_fields.py covers quantities, soak tests the others."""


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in LEARNED]
)
def test_the_tutorial_learns(run_hpcdl: CommandLine, name: str) -> None:
    text = (TUTORIALS / f"{name}.md").read_text()
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (run_hpcdl.home / code.partition("\n")[0].removeprefix("# ")).write_text(code)
    subprocess.run([sys.executable, "made.py"], cwd=run_hpcdl.home, check=True, timeout=120)
    commands = re.findall(r"^hpcdl (.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = run_hpcdl(command.split() + ["--json"] * command.startswith("evaluate"))
        assert done.code == 0, done.err
    measure, least = LEARNED[name]
    assert done.json()[measure] > least

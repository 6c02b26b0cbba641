"""The tutorial on the time of a step: its study and commands run as written."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.conftest import ROOT, CommandLine

PAGE = ROOT / "docs" / "tutorials" / "where-the-time-goes.md"


@pytest.mark.mpi
@pytest.mark.soak
def test_every_command_does_what_the_page_says(run_hpcdl: CommandLine) -> None:
    text = PAGE.read_text()
    (study,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (run_hpcdl.home / "where.toml").write_text(study)
    reported = {}
    commands = re.findall(r"^hpcdl (.*)$", text, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        done = run_hpcdl(shlex.split(command))
        assert done.code == 0, f"{command}: {done.err}"
        reported[command] = done.out
    report = (run_hpcdl.home / "report" / "report.html").read_text()
    for title in re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE):
        assert re.search(rf"<h2[^>]*>{title}", report), title
    layers = reported["trace layers --html layers.html"]
    assert "Gap between updates" in layers and all(name in layers for name in ("conv1", "conv2", "dense1", "logits"))
    assert "backward conv1" in (run_hpcdl.home / "layers.html").read_text()
    both = reported["trace layers saving"]
    assert all(both.count(words) == 2 for words in ("mean step", "gap between updates", "of a step, idle"))
    assert re.search(r"^background work +.* in gaps", both, re.MULTILINE)
    assert list((run_hpcdl.home / "saving" / "checkpoints").iterdir()), "one is saved each second"

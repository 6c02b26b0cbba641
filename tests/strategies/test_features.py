"""The features that strategies declare match the docs and what the command line refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import UsageError
from hpcdl.strategies.refusals import check_exchange, check_optimizer
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import ROOT, CommandLine

EXCHANGES = {
    "compression": ({"compress": "fp16"}, "--compress fp16"),
    "accumulation": ({"accumulate": 2}, "--accumulate 2"),
    "backup_workers": ({"backup_workers": 1}, "--backup-workers 1"),
}


@pytest.mark.parametrize("feature", EXCHANGES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_exchange_setting_is_taken_or_refused_as_declared(name: str, feature: str) -> None:
    info = STRATEGIES[name]
    settings, words = EXCHANGES[feature]
    exchange = ExchangeConfig(strategy=name, **settings)
    if getattr(info.features, feature):
        check_exchange(info, exchange, num_workers=3)
        return
    with pytest.raises(UsageError, match=words):
        check_exchange(info, exchange, num_workers=3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_placement_and_lars_are_taken_or_refused_as_declared(name: str) -> None:
    info = STRATEGIES[name]
    for placement in ("round-robin", "greedy", "split"):
        exchange = ExchangeConfig(strategy=name, placement=placement)
        if placement in info.features.placements:
            check_exchange(info, exchange, num_workers=2)
        else:
            with pytest.raises(UsageError, match=f"--placement {placement}"):
                check_exchange(info, exchange, num_workers=2)
    if info.features.lars:
        check_optimizer(info, OptimizerConfig(optimizer="lars"), "float32")
    else:
        with pytest.raises(UsageError, match="lars"):
            check_optimizer(info, OptimizerConfig(optimizer="lars"), "float32")


def test_the_command_line_refuses_before_anything_starts(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    words = ["train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--strategy", "ps", "--ranks", "2"]
    finished = ask_hpcdl([*words, "--compress", "fp16", "--run-dir", tmp_path / "run"])
    assert finished.code == 2
    assert "--compress fp16: strategy 'ps' does not have it" in finished.err
    assert not (tmp_path / "run").exists()


def test_the_table_in_the_docs_is_that_of_the_declarations(tmp_path: Path) -> None:
    page = ROOT / "docs" / "reference" / "strategies.md"
    copy = tmp_path / "strategies.md"
    copy.write_text(page.read_text().replace("(strategies/auto.md) | yes |", "(strategies/auto.md) |  |"))
    assert copy.read_text() != page.read_text()
    subprocess.run([sys.executable, ROOT / "scripts" / "make_strategy_table.py", copy], check=True)
    assert copy.read_text() == page.read_text(), "run python scripts/make_strategy_table.py"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_page_of_its_own(name: str) -> None:
    text = (ROOT / "docs" / "reference" / "strategies" / f"{name}.md").read_text()
    info = STRATEGIES[name]
    assert info.summary in text and info.source in text, "run python scripts/make_strategy_table.py"
    has = re.search(r"^- Has: (.*)$", text, re.MULTILINE)
    assert has is not None and ("`--servers`" in has[1]) == info.features.servers
    assert ("exact resume" in has[1]) == info.features.exact_resume
    for heading in ("Equation", "Messages", "When", "Cost"):
        section = re.search(rf"^## {heading}\n\n(.+)", text, re.MULTILINE)
        assert section is not None and len(section[1]) > 8, f"{name}.md says nothing under {heading}"

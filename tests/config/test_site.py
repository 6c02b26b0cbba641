"""Settings that site.toml enforces, and what no command would read in it or in a user's config.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcdl.config.load import TABLES, site_rules, standard_layers
from hpcdl.core.errors import ConfigError, UsageError
from tests.lab.needs import ROOT


@pytest.fixture
def site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCDL_SITE_CONFIG", str(tmp_path / "site.toml"))
    return tmp_path / "site.toml"


def test_nothing_is_ruled_where_there_is_no_file(site_file: Path) -> None:
    assert site_rules().forbid_strategies == ()


def test_strategies_can_be_forbidden(site_file: Path) -> None:
    site_file.write_text('[site]\nforbid-strategies = ["grpc-ps"]\n[train]\nepochs = 2\n')
    assert site_rules().forbid_strategies == ("grpc-ps",)
    assert site_rules().origin == str(site_file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("site = 1", "must be a table"),
        ('[site]\nforbid-strategies = "grpc-ps"', "list of names"),
        ("[site]\nforbid-strategy = []", "did you mean 'forbid-strategies'"),
    ],
)
def test_a_slip_is_reported(site_file: Path, text: str, says: str) -> None:
    site_file.write_text(text)
    with pytest.raises(UsageError, match=says):
        site_rules()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch-size = 64\n[train]\n", "batch-size is in no table; write it below the table of a command"),
        ("[trian]\nbatch-size = 64\n", "unknown table [trian]; did you mean 'train'?"),
        ("[report]\nformat = 'html'\n", "unknown table [report]; known: bench-allreduce,"),
    ],
)
@pytest.mark.parametrize("place", ["site", "user"])
def test_what_no_command_reads_is_refused(
    site_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str, says: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hpcdl").mkdir()
    path = site_file if place == "site" else tmp_path / "hpcdl" / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {says}")):
        standard_layers("train")


def test_tables_of_all_commands_are_known_and_rules_stand_in_site_toml_alone(
    site_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows editors put a mark before the first line, which is no part of it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hpcdl").mkdir()
    text = "".join(f"[{name}]\n" for name in TABLES)
    site_file.write_text(f"{text}[site]\n", encoding="utf-8-sig")
    (tmp_path / "hpcdl" / "config.toml").write_text(text)
    assert len(standard_layers("train")) == 2
    (tmp_path / "hpcdl" / "config.toml").write_text("[site]\n")
    with pytest.raises(ConfigError, match="the table \\[site\\] holds for all users"):
        standard_layers("train")


def test_the_tables_are_those_that_commands_read() -> None:
    source = "".join(path.read_text() for path in (ROOT / "hpcdl").rglob("*.py"))
    read = re.findall(r"(?:\bresolved\(\s*\w+, |standard_layers\()\"([\w-]+)\"", source)
    assert sorted(set(read)) == sorted(TABLES)

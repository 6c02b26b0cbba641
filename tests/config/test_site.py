"""Settings that site.toml enforces."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdl.config.load import site_rules
from hpcdl.core.errors import UsageError


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

"""A few tries of the campaign of kills; `python -m tests.campaign` has all, for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.kills import Campaign, Try, table
from tests.campaign.targets import TARGETS


def struck(folder: Path, names: list[str], tries: int) -> None:
    campaign = Campaign(folder / "campaign", names, seed=2)
    wrong = [one for name in names for one in campaign.tries(name, tries) if one.problems or one.lost]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.long
def test_killed_while_shards_are_written_or_hpcdl_is_installed(tmp_path: Path) -> None:
    struck(tmp_path, ["shard", "install"], 2)


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_killed_at_many_moments(tmp_path: Path, name: str) -> None:
    """Commands survive many kills; `make test-all` has two above, and runs in tests/launch/test_resume_command.py."""
    struck(tmp_path, [name], 10)


def test_the_table_counts() -> None:
    found = [
        Try(command="train", number=0, way="SIGTERM", end="resumed"),
        Try(command="train", number=1, way="one process", end="refused: no", lost=["a file"]),
        Try(command="shard", number=0, way="SIGTERM", problems=["a trace"]),
    ]
    rows = [row.split(" | ") for row in table(found).splitlines()[2:]]
    assert [row[0] for row in rows] == ["| `train`", "| `shard`", "| all"]
    assert [row[1:] for row in rows] == [
        ["0", "1", "0", "1", "0", "1", "1", "1", "0 |"],
        ["0", "0", "0", "1", "0", "0", "0", "0", "1 |"],
        ["0", "1", "0", "2", "0", "1", "1", "1", "1 |"],
    ]

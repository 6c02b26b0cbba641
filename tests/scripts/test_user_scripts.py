"""Scripts of many kinds, as their users write them: the same weights on both ranks at the end, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPTS = sorted(path.stem for path in (HERE / "user_scripts").glob("*.py"))
SAMPLE = ("generator_input",)
"""The other scripts run in the long version; `make test-all` has a tape and an embedding in test_tutorials.py."""


def words_of(hpcdl: CommandLine, folder: Path, names: list[str]) -> dict[str, str]:
    """Return how each script has ended; all of them run in one start of two ranks."""
    paths = [HERE / "user_scripts" / f"{name}.py" for name in names]
    finished = succeed(run_script(hpcdl, HERE / "user_scripts_script.py", *paths, ranks=2, cwd=folder, timeout_s=900))
    lines = (line.split(" ", 1) for line in finished.out.splitlines() if ".py " in line)
    return {name.removesuffix(".py"): word.rpartition(" ")[0] for name, word in lines}


@pytest.fixture(scope="module")
def sample(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return words_of(session_hpcdl, tmp_path_factory.mktemp("sample"), list(SAMPLE))


@pytest.fixture(scope="module")
def others(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return words_of(session_hpcdl, tmp_path_factory.mktemp("others"), [name for name in SCRIPTS if name not in SAMPLE])


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_ends_with_the_same_weights(sample: dict[str, str], name: str) -> None:
    assert sample.get(name) == "alike"


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in SAMPLE])
def test_every_script_ends_with_the_same_weights(others: dict[str, str], name: str) -> None:
    assert others.get(name) == "alike"


def test_there_are_scripts_of_fifteen_kinds() -> None:
    assert len(SCRIPTS) >= 15

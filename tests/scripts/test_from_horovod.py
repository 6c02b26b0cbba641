"""Scripts as Horovod's users have them, with `import hpcdl as hvd`: all ranks end with the same weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, CommandLine
from tests.scripts.scripts import HERE, run_script, succeed
from tests.training_runs import record_of

pytestmark = pytest.mark.mpi
SCRIPTS = sorted(path.stem for path in (HERE / "from_horovod").glob("*.py") if "elastic" not in path.stem)
ELASTIC = {"tf2_keras_elastic": ("kill:rank=1@step=3", [6, 0]), "tf2_elastic": ("kill:rank=1@step=12", [0, 20])}
"""Scripts with a fault after a checkpoint, and the epochs and batches that their state counts at the end."""


@pytest.fixture(scope="module")
def folder(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("from-horovod")
    paths = [HERE / "from_horovod" / f"{name}.py" for name in SCRIPTS]
    succeed(run_script(session_hpcdl, HERE / "horovod_runner.py", place, *paths, ranks=2, cwd=place))
    return place


@pytest.mark.parametrize("script", SCRIPTS)
def test_ranks_end_with_the_same_weights(script: str, folder: Path) -> None:
    assert len(ended_alike(folder, script)) == 1


def ended_alike(folder: Path, script: str) -> list[Any]:
    """Return what both ranks report at a script's end."""
    one, two = (json.loads((folder / f"{rank}.json").read_text())[script] for rank in range(2))
    assert re.fullmatch("[0-9a-f]{64}", one[0]), one[0]
    assert one == two
    return list(one)


def test_the_elastic_ones_are_all_run() -> None:
    assert {path.stem for path in (HERE / "from_horovod").glob("*elastic*.py")} == set(ELASTIC)


@pytest.mark.long
@pytest.mark.parametrize("script", ["tf2_keras_elastic", pytest.param("tf2_elastic", marks=pytest.mark.soak)])
def test_an_elastic_script_continues_after_a_lost_rank(script: str, session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """`hvd.elastic.run` resumes the training; hpcdl.State counts as Horovod's does, and ranks end alike."""
    fault, counted = ELASTIC[script]
    words = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", "--elastic", "--checkpoint-every", "0.01s"]
    words += ["--inject", fault, HERE / "horovod_runner.py", tmp_path, HERE / "from_horovod" / f"{script}.py"]
    ended = session_hpcdl(words, timeout_s=300)
    assert ended.code == 0, ended.err
    assert ended.err.count("new ranks continue") == 1
    assert record_of(tmp_path / "run")["resumed_from_steps"], "from the checkpoint, not from the start"
    assert ended_alike(tmp_path, script)[1:] == counted


def test_the_page_has_every_public_name() -> None:
    import hpcdl

    page = (ROOT / "docs" / "reference" / "horovod.md").read_text()
    assert not [name for name in hpcdl.__all__ if name not in ("__version__", "data") and name not in page]

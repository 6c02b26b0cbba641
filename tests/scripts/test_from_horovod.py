"""Scripts as Horovod's users have them, with `import hpcdl as hvd`: all ranks end with the same weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, CommandLine
from tests.scripts.scripts import HERE, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPTS = sorted(path.stem for path in (HERE / "from_horovod").glob("*.py"))


@pytest.fixture(scope="module")
def folder(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("from-horovod")
    succeed(run_script(session_hpcdl, HERE / "horovod_runner.py", place, ranks=2, cwd=place))
    return place


@pytest.mark.parametrize("script", SCRIPTS)
def test_ranks_end_with_the_same_weights(script: str, folder: Path) -> None:
    one, two = (json.loads((folder / f"{rank}.json").read_text())[script] for rank in range(2))
    assert re.fullmatch("[0-9a-f]{64}", one), one
    assert one == two


def test_the_page_has_every_public_name() -> None:
    import hpcdl

    page = (ROOT / "docs" / "how-to" / "from-horovod.md").read_text()
    assert not [name for name in hpcdl.__all__ if name not in ("__version__", "data") and name not in page]

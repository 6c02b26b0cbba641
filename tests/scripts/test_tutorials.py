"""The tutorials' scripts as printed, on two ranks: they learn, and all ranks end with the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, CommandLine, Finished, selected
from tests.scripts.scripts import HERE, run_script, succeed

pytestmark = pytest.mark.mpi
TUTORIALS = ROOT / "docs" / "tutorials"
LEARNT = {
    "custom-loop": (r"^accuracy: ([\d.]+)$", lambda found: found > 0.9),
    "gan": (r"^distance of the means: ([\d.]+)$", lambda found: found < 1.0),
    "text": (r"^held out: accuracy ([\d.]+), AUC", lambda found: found > 0.9),
    "from-horovod": (r"^training accuracy: ([\d.]+)$", lambda found: found > 0.9),
}
"""Pages that print a whole script, with the output line of its result, and the value that is required."""
QUICK = ("custom-loop", "text")
"""The others run in the long version; `make test-all` has Horovod's scripts and two optimizers in other tests."""


def script_of(page: Path) -> str:
    """Return the one Python block of a page that begins with hpcdl's import; other blocks are parts."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    (whole,) = [block for block in blocks if block.startswith("import hpcdl")]
    return str(whole)


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """The selected scripts after a run in one start of two ranks."""
    folder = tmp_path_factory.mktemp("tutorials")
    paths = [folder / f"{name}.py" for name in selected(request, "name")]
    for path in paths:
        path.write_text(script_of(TUTORIALS / f"{path.stem}.md"))
    return succeed(run_script(session_hpcdl, HERE / "user_scripts_script.py", *paths, ranks=2, cwd=folder))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in LEARNT]
)
def test_a_tutorial_learns_and_ranks_end_alike(ended: Finished, name: str) -> None:
    assert re.search(rf"^{name}.py alike ", ended.out, re.MULTILINE), ended.out
    pattern, enough = LEARNT[name]
    (found,) = re.findall(pattern, ended.out, re.MULTILINE)
    assert enough(float(found))


def test_every_tutorial_with_a_whole_script_is_run() -> None:
    whole = {page.stem for page in TUTORIALS.glob("*.md") if "```python\nimport hpcdl\n" in page.read_text()}
    assert whole | {"from-horovod"} == set(LEARNT)

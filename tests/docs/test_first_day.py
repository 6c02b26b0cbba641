"""The tasks of a first day: each page's commands run as written, by an ordinary user if possible."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DIGITS, ROOT, CommandLine, finish

HOW_TO = ROOT / "docs" / "how-to"
NOBODY = 65534
MOST_COMMANDS = 6


def photos(folder: Path) -> None:
    shutil.copytree(DIGITS, folder / "photos")


def table(folder: Path) -> None:
    photos(folder)
    lines = [f"photos/{path.parent.name}/{path.name},{path.parent.name}" for path in sorted(DIGITS.glob("*/*.png"))]
    (folder / "labels.csv").write_text("\n".join(["file,label", *lines, ""]))


def shards(folder: Path) -> None:
    line = ["hpcdl", "shard", str(DIGITS), "shards", "--image-size", "28", "--split", "train=0.8,val=0.2"]
    subprocess.run([sys.executable, "-m", *line], cwd=folder, check=True, capture_output=True, timeout=300)


def study(folder: Path) -> None:
    shards(folder)
    page = (HOW_TO / "compare-strategies.md").read_text()
    text = re.search(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert text is not None
    (folder / "compare.toml").write_text(text[1])


def runs(folder: Path) -> None:
    shutil.copytree(ROOT / "tests" / "studies" / "five-hosts" / "1-node" / "runs", folder / "runs")


TASKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "own-images": (photos, "runs/photos/model.keras"),
    "own-table": (table, "runs/table/model.keras"),
    "own-model": (shards, "served/saved_model.pb"),
    "own-script": (shards, "runs/script/record.json"),
    "compare-strategies": (study, "report/report.html"),
    "killed-and-resumed": (shards, "runs/long/model.keras"),
    "infer": (shards, "outputs/report/report.html"),
    "batch-job": (shards, ""),
    "paper-report": (runs, "report/report.html"),
    "slow-node": (shards, ""),
    "install-for-all": (lambda folder: None, ""),
}
"""By page: what is prepared, and the file that its last command leaves."""
QUICK = ("own-table", "batch-job", "paper-report", "install-for-all")
STARTS_RANKS = (
    "own-table",
    "own-model",
    "own-script",
    "compare-strategies",
    "killed-and-resumed",
    "infer",
    "slow-node",
)


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that an ordinary user can enter: pytest closes its own to other users when another pytest starts."""
    with tempfile.TemporaryDirectory(prefix="hpcdl-user-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def marked(task: str) -> Any:
    marks = [] if task in QUICK else [pytest.mark.soak]
    return pytest.param(task, marks=[*marks, pytest.mark.mpi] if task in STARTS_RANKS else marks)


def script(task: str) -> str:
    return "".join(re.findall(r"^```bash\n(.*?)^```$", (HOW_TO / f"{task}.md").read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_few_commands(task: str) -> None:
    text = (HOW_TO / f"{task}.md").read_text()
    lines = [line for line in script(task).splitlines() if line.strip()]
    others = re.findall(r"^ {4}(?:hpcdl|make|module) .*$", text, re.MULTILINE)
    assert 1 <= len(lines) + len(others) <= MOST_COMMANDS
    assert f"how-to/{task}.md" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("task", [marked(task) for task in TASKS])
def test_the_commands_do_what_the_page_says(task: str, run_hpcdl: CommandLine, home: Path) -> None:
    prepare, left = TASKS[task]
    prepare(home)
    finished = finish(as_user(f"set -e -o pipefail\n{script(task)}", home, run_hpcdl), timeout_s=900)
    assert finished.code == 0, finished.out[-3000:] + finished.err[-3000:]
    assert "Traceback" not in finished.err
    assert (home / left).exists()


def nobody_runs_python() -> bool:
    """Return whether an ordinary user can start this Python; below root's home they cannot."""
    try:
        line = [sys.executable, "-c", "import hpcdl.cli.app"]
        return subprocess.run(line, user=NOBODY, group=NOBODY, extra_groups=[], cwd=ROOT, check=False).returncode == 0
    except PermissionError:
        return False


def as_user(text: str, home: Path, run_hpcdl: CommandLine) -> subprocess.Popen[str]:
    """Start a shell in `home` as after `source .venv/bin/activate`, as an ordinary user if root runs the tests.

    No variable of hpcdl is set, as for a reader of the page.
    """
    environment = {
        name: value for name, value in run_hpcdl.environment.items() if not name.startswith(("HPCDL_", "XDG_"))
    }
    environment |= {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    lowered = {}
    if os.geteuid() == 0 and nobody_runs_python():
        for path in (home, *home.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        lowered = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return subprocess.Popen(
        ["bash", "-c", text], cwd=home, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **lowered,
    )  # fmt: skip

"""The commands that are struck: how they are called, how they are resumed, and when their result is complete."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import DIGITS, CommandLine
from tests.site.checkouts import clean_environment, copy_checkout
from tests.training_runs import SHORT, record_of, steps_done

HERE = Path(__file__).parent
EPOCHS, PER_EPOCH = 5, 1437 // 32
STUDY = """
repeats = 1
[matrix]
model = ["lenet"]
data = ["synthetic:mnist@200"]
strategy = ["ring"]
workers = [1, 2]
threads = [1]
batch-size = [16]
[train]
steps = 30
"""
SEARCH = """
trials = 3
sampler = "random"
parallel = 1
[space]
learning-rate = {low = 1e-3, high = 0.1, log = true}
[train]
model = "lenet"
data = "DATA"
strategy = "single"
epochs = 1
profile = "none"
"""
Words = Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one try: the command writes into `out`; `common` is what all tries read."""

    folder: Path
    common: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def temporary(self) -> Path:
        """The command's TMPDIR, by which its processes are known."""
        return self.folder / "tmp"


def _line(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "hpcdl", *map(str, words)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One command. `words` start it, `again` resumes what a killed one has left.

    `lacks` returns what is missing in a result, empty if it is complete. `own` are the folders, below that of the try,
    in which the user has files; those of `before` exist before the command starts. `progress` returns the number of
    finished steps, of `steps`, if the command reports them. `saved` is the newest saved step. `stopped` are the exit
    codes of a command that was asked to stop.
    """

    words: Callable[[Place], list[str]]
    again: Callable[[Place], list[str]]
    lacks: Callable[[Place], str]
    own: Sequence[str] = ("out",)
    before: Sequence[str] = ()
    cwd: Callable[[Place], Path] = lambda place: place.folder
    variables: Callable[[Place], Mapping[str, str]] = lambda place: {}
    prepare: Callable[[Place], None] = lambda place: None
    progress: Callable[[Path], int] | None = None
    steps: int = 0
    saved: Callable[[Path], int] = lambda out: 0
    lost_rank: Sequence[int] = (0, 1)
    stopped: Sequence[int] = (0, 75, 130)


# Runs


def _train(place: Place) -> list[str]:
    words = [*SHORT, "--data", place.common / "shards", "--epochs", EPOCHS, "--checkpoint-every", "0.2s"]
    return _line(*map(str, words), "--run-dir", "out")


def _run(place: Place, *more: str) -> list[str]:
    words = ["run", "--ranks", "2", "--profile", "none", "--checkpoint-every", "0.1s", "--run-dir", "out", *more]
    return _line(*words, HERE / "script.py")


def _unfinished(place: Place) -> str:
    status = record_of(place.out)["status"]
    return "" if status == "finished" else f"its record says {status}"


def _untrained(place: Place) -> str:
    return _unfinished(place) or ("" if (place.out / "model.keras").is_file() else "it has no model.keras")


def _saved(run_dir: Path) -> int:
    """Return the newest step of a checkpoint that was complete when the run was struck."""
    found = (run_dir / "checkpoints").glob("step-*/checkpoint.json")
    return max((int(path.parent.name.partition("-")[2]) for path in found if not path.parent.suffix), default=0)


# Data


def _shard(place: Place, *more: str) -> list[str]:
    split = ["--image-size", "28", "--split", "train=0.8,val=0.2", "--shards", "12", "--workers", "2"]
    return _line("shard", DIGITS, "out", *split, *more)


def _other_shards(place: Place) -> str:
    """Return the shards that are missing or changed: their bytes depend only on their source and plan."""
    mine, whole = place.out, place.common / "shard" / "out"
    names = {str(path.relative_to(whole)) for path in whole.rglob("*.h5")} | {"manifest.json"}
    others = [name for name in sorted(names) if not (mine / name).is_file()]
    others = others or [name for name in sorted(names) if (mine / name).read_bytes() != (whole / name).read_bytes()]
    return f"{', '.join(others)} missing or not as in an undisturbed one" if others else ""


# Studies


def _study_lacks(place: Place) -> str:
    states = [run["status"] for run in json.loads((place.out / "study.json").read_text())["runs"]]
    return "" if states == ["finished"] * 2 else f"its runs are {states}"


def _search_lacks(place: Place) -> str:
    trials = json.loads((place.out / "search.json").read_text())["trials"]
    numbers, states = [trial["number"] for trial in trials], [trial["state"] for trial in trials]
    sound = len({*numbers}) == len(numbers) and states.count("finished") == 3 and "running" not in states
    return "" if sound or states.count("failed") else f"its trials are {states}"


def _report_lacks(place: Place) -> str:
    json.loads((place.out / "report.json").read_text())
    html = (place.out / "report.html").read_text()
    return "" if html.rstrip().endswith("</html>") else "its page is not whole"


# Installations


def _installed(place: Place) -> str:
    tree = place.out / "hpcdl" / "1.0"
    wanted = [tree / "install.json", tree / "bin" / "hpcdl-python", place.out / "modulefiles" / "hpcdl" / "1.0.lua"]
    wanted += [place.out / "hpcdl" / "0.9" / "install.json"]
    missing = [str(path.relative_to(place.out)) for path in wanted if not path.is_file()]
    left = [path.name for path in (place.out / "hpcdl").iterdir() if path.name not in ("1.0", "0.9", OWN)]
    return f"{missing} missing, {left} left over" if missing or left else ""


def _other_version(place: Place) -> None:
    """Create another version that is installed already."""
    tree = place.out / "hpcdl" / "0.9"
    (tree / "venv").mkdir(parents=True)
    (tree / "install.json").write_text('{"version": "0.9"}')
    (place.out / "modulefiles" / "hpcdl").mkdir(parents=True)


def _install_settings(place: Place) -> dict[str, str]:
    apps = place.out
    named = {"PREFIX": apps / "hpcdl", "MODULEDIR": apps / "modulefiles", "PYTHON": sys.executable, "FORCE": "1"}
    return {name: str(value) for name, value in named.items()}


def _install(place: Place) -> list[str]:
    return [sys.executable, "-B", str(HERE / "installer.py"), "install"]


OWN = "of my own.txt"
TARGETS: dict[str, Target] = {
    "train": Target(
        words=_train, again=lambda place: [*_train(place), "--resume"], lacks=_untrained,
        own=("out", "out/checkpoints", "out/ranks"), progress=steps_done, steps=EPOCHS * PER_EPOCH, saved=_saved,
    ),
    "run": Target(
        words=_run, again=lambda place: _run(place, "--resume"), lacks=_unfinished,
        own=("out", "out/checkpoints", "out/ranks"), saved=_saved,
    ),
    "shard": Target(
        words=_shard, again=lambda place: _shard(place, "--resume"), lacks=_other_shards, own=("out", "out/train"),
    ),
    "sweep": Target(
        words=lambda place: _line("sweep", place.common / "study.toml", "--out", "out"),
        again=lambda place: _line("sweep", place.common / "study.toml", "--out", "out", "--resume"),
        lacks=_study_lacks, own=("out", "out/runs"),
    ),
    "search": Target(
        words=lambda place: _line("search", place.common / "search.toml", "--out", "out"),
        again=lambda place: _line("search", place.common / "search.toml", "--out", "out", "--resume"),
        lacks=_search_lacks, own=("out", "out/trials"),
    ),
    "report": Target(
        words=lambda place: _line("report", place.common / "train" / "out", "--out", "out"),
        again=lambda place: _line("report", place.common / "train" / "out", "--out", "out"),
        lacks=_report_lacks, before=("out",), stopped=(0, 130, -15, -2),
    ),
    "install": Target(
        words=_install, again=_install, lacks=_installed, prepare=_other_version,
        before=("out", "out/hpcdl", "out/hpcdl/0.9", "out/modulefiles", "out/modulefiles/hpcdl"),
        cwd=lambda place: place.common / "checkout",
        variables=lambda place: {**clean_environment(place.folder), **_install_settings(place)},
    ),
}  # fmt: skip
"""The commands that are struck, by name."""


def make_common(common: Path, names: Sequence[str]) -> None:
    """Create what the commands read: data, studies, a checkout."""
    common.mkdir(parents=True)
    home = common / "home"
    home.mkdir()
    if not {"train", "search", "report"}.isdisjoint(names):
        split = ["--image-size", "28", "--split", "train=0.8,val=0.2"]
        finished = CommandLine(home)(["shard", DIGITS, common / "shards", *split])
        assert finished.code == 0, finished.err
    (common / "study.toml").write_text(STUDY)
    (common / "search.toml").write_text(SEARCH.replace("DATA", str(common / "shards")))
    if "install" in names:
        copy_checkout(common / "checkout", "1.0")

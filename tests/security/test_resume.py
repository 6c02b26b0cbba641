"""--resume: what it accepts as a run, what it leaves if ranks refuse, and its message about missing checkpoints."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags
from tests.conftest import CommandLine, finish
from tests.security.conftest import TRAIN
from tests.security.users import facts_below, refused
from tests.training_runs import events, record_of, wait_for

pytestmark = pytest.mark.mpi
SCRIPT = Path(__file__).with_name("own_state.py")
WRONG_LOSS = ["--loss", "huber"]
WRONG_OUTPUTS = """import keras


def build():
    return keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(7)])
"""
SHORT = ["--steps", "2"]
CHANGED = ("ranks", "metrics.jsonl", "record.json", "trace", ".hpcdl-lock")
"""Names that change in a run: messages of ranks until they refused, and a lock that no process holds."""


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """This test's copy of the run of eight steps with two checkpoints."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize("form", [".", "relative", "absolute"])
def test_a_folder_of_the_users_is_no_run(ask_hpcdl: CommandLine, tmp_path: Path, command: str, form: str) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "thesis.txt").write_text("years of work")
    (project / "src" / "code.py").write_text("x = 1")
    folder, cwd = {".": (".", project), "relative": ("project", tmp_path), "absolute": (str(project), tmp_path)}[form]
    own = [*TRAIN, *SHORT] if command == "train" else ["run"]
    behind = [] if command == "train" else [SCRIPT]
    before = facts_below(project)
    finished = ask_hpcdl([*own, "--resume", "--run-dir", folder, *behind], cwd=cwd)
    assert refused(finished) and "holds no run to resume" in finished.err, finished.err
    assert facts_below(project) == before


@pytest.mark.parametrize(
    ("place", "ranks", "launched", "wrong"),
    [
        ("new", 1, False, "loss"),
        pytest.param("empty", 2, False, "outputs", marks=pytest.mark.soak),
        ("run", 1, False, "loss"),
        ("meanwhile", 1, False, "outputs"),
        pytest.param("new", 2, True, "loss", marks=pytest.mark.soak),
        ("run", 2, True, "loss"),
        ("from scratch", 1, False, "loss"),
        ("from scratch", 2, True, "loss"),
    ],
)
def test_where_ranks_refuse_all_is_as_it_was(
    run_hpcdl: CommandLine, run: Path, tmp_path: Path, place: str, ranks: int, launched: bool, wrong: str
) -> None:
    """Everything stays as it was if ranks refuse: only TensorFlow detects a loss or a class without its output."""
    (tmp_path / "seven.py").write_text(WRONG_OUTPUTS)
    folder = {"run": run, "from scratch": run, "empty": tmp_path / "empty"}.get(place, tmp_path / "a" / "b")
    if place == "empty":
        folder.mkdir()
    words: list[Any] = [*TRAIN, "--resume", "--run-dir", folder, "--steps", "9"]
    words += WRONG_LOSS if wrong == "loss" else ["--model", f"{tmp_path}/seven.py:build"]
    words += ["--allow", "loss"] if folder == run else []
    words += ["--from-scratch"] if place == "from scratch" else []
    before = facts_below(run, but=CHANGED)
    process = under_launcher(run_hpcdl, words, ranks) if launched else run_hpcdl.start([*words, "--ranks", str(ranks)])
    if place == "meanwhile":
        wait_for(lambda: (folder / "run.toml").exists() or process.poll() is not None)
        (folder / "thesis.txt").write_text("years of work")
    finished = finish(process)
    assert finished.code == 2, finished.err
    if folder == run:
        after = facts_below(run, but=CHANGED)
        assert contents(after) == contents(before)
    elif place == "meanwhile":
        assert (folder / "thesis.txt").read_text() == "years of work"
    elif place == "empty":
        assert not any(folder.iterdir())
    else:
        assert not folder.exists()


def under_launcher(hpcdl: CommandLine, words: list[Any], ranks: int) -> subprocess.Popen[str]:
    """Start `mpiexec -n RANKS hpcdl WORDS`."""
    mpiexec = find_mpiexec()
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", str(ranks), sys.executable, "-m", "hpcdl"]
    return subprocess.Popen(
        [*line, *map(str, words)],
        cwd=hpcdl.home,
        env=hpcdl.environment | dict(environment_for(mpiexec.flavour)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def contents(facts: dict[str, tuple[object, ...]]) -> dict[str, object]:
    """Return file contents by name, without times: a file rewritten with equal content has another time."""
    return {name: fact[-1] for name, fact in facts.items() if name != "."}


@pytest.mark.parametrize("become", ["gone", "empty", "dangling"])
def test_a_run_whose_checkpoints_are_gone_is_not_resumed(ask_hpcdl: CommandLine, run: Path, become: str) -> None:
    shutil.rmtree(run / "checkpoints")
    if become == "empty":
        (run / "checkpoints").mkdir()
    if become == "dangling":
        (run / "checkpoints").symlink_to(run / "moved")
    before = facts_below(run)
    finished = ask_hpcdl(["train", "--resume", "--run-dir", run])
    assert refused(finished) and "--from-scratch" in finished.err, finished.err
    assert facts_below(run) == before


def test_from_scratch_starts_again_and_keeps_what_was_saved(run_hpcdl: CommandLine, run: Path) -> None:
    (run / "checkpoints" / "thesis.txt").write_text("years of work")
    before, model = contents(facts_below(run / "checkpoints")), (run / "model.keras").read_bytes()
    finished = run_hpcdl(["train", "--resume", "--from-scratch", "--run-dir", run])
    assert finished.code == 0, finished.err
    assert contents(facts_below(run / "checkpoints.1")) == before and "checkpoints.1" in finished.err
    assert (run / "model.1.keras").read_bytes() == model and "its earlier model is" in finished.err
    assert (run / "model.keras").exists()
    assert not record_of(run)["resumed_from_steps"] and [*(run / "checkpoints").glob("step-*")]


def test_files_of_the_users_in_a_run_stay(run_hpcdl: CommandLine, run: Path) -> None:
    """Old checkpoints are removed, unless they contain a file of the user."""
    steps = sorted((run / "checkpoints").glob("step-*"))
    own = [steps[0] / "thesis.txt", run / "checkpoints" / ".x.tmp", run / "thesis.txt", run / ".x.tmp", run / "x" / "y"]
    own += [run / "ranks" / "notes.txt", run / "trace" / "notes.txt", run / "checkpoints" / ".step-x.tmp" / "y"]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("years of work")
    words = ["train", "--resume", "--run-dir", run, "--allow", "steps", "--steps", "12"]
    finished = run_hpcdl([*words, "--checkpoint-every", "0.001s"])
    assert finished.code == 0, finished.err
    assert {path.read_text() for path in own} == {"years of work"}
    assert steps[0].exists() and not steps[1].exists()


def test_a_run_that_was_killed_before_it_had_saved_begins_again(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = run_hpcdl.start([*TRAIN, "--steps", "100000", "--checkpoint-every", "1h", "--run-dir", run])
    wait_for(lambda: bool(events(run, "step")) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    finish(process)
    words = ["train", "--resume", "--run-dir", run, "--allow", "steps", "--steps", "2"]
    finished = run_hpcdl(words)
    assert finished.code == 0 and not record_of(run)["resumed_from_steps"], finished.err
    assert "began again from the start: times and node-hours leave out" in " ".join(record_of(run)["warnings"])


def test_a_script_whose_checkpoints_are_gone(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A script with hpcdl.State gets the same message about missing checkpoints as `train`."""
    run = tmp_path / "run"
    finished = run_hpcdl(["run", "--checkpoint-every", "0.001s", "--run-dir", run, SCRIPT])
    assert finished.code == 0 and [*(run / "checkpoints").glob("step-*")], finished.err
    saved = tmp_path / "saved"
    (run / "checkpoints").rename(saved)
    before = facts_below(run)
    for become in (lambda: None, (run / "checkpoints").mkdir):
        become()
        finished = run_hpcdl(["run", "--resume", "--run-dir", run, SCRIPT])
        assert refused(finished) and "--from-scratch" in finished.err, finished.err
    (run / "checkpoints").rmdir()
    assert contents(facts_below(run)) == contents(before)
    shutil.copytree(saved, run / "checkpoints")
    finished = run_hpcdl(["run", "--resume", "--from-scratch", "--run-dir", run, SCRIPT])
    assert finished.code == 0 and "begins at epoch 0" in finished.out, finished.err
    assert contents(facts_below(run / "checkpoints.1")) == contents(facts_below(saved))


def test_a_run_of_a_study_that_is_made_again_keeps_the_users_files(
    ask_hpcdl: CommandLine, run: Path, tmp_path: Path
) -> None:
    """A study run killed halfway is made again, and keeps files that the user has added."""
    study = tmp_path / "study"
    (tmp_path / "study.toml").write_text(
        'repeats = 1\nretries = 0\nrun-timeout = "1s"\n[matrix]\nmodel = ["lenet"]\ndata = ["synthetic:mnist@200"]\n'
        'strategy = ["single"]\nworkers = [1]\n[train]\nsteps = 2\nprofile = "none"\n'
    )
    words = ["sweep", tmp_path / "study.toml", "--out", study, "--resume"]
    assert ask_hpcdl(words).code == 1
    state = (study / "study.json").read_text()
    (study / "study.json").write_text(state.replace('"failed"', '"running"'))
    one = study / "runs" / "001-single-1w-32b-r1"
    shutil.rmtree(one, ignore_errors=True)
    run.rename(one)
    (one / "record.json").unlink()
    (one / "thesis.txt").write_text("years of work")
    ask_hpcdl(words)
    assert [path.read_text() for path in study.rglob("thesis.txt")] == ["years of work"]

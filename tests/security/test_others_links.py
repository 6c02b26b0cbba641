"""Links planted by others where hpcdl writes change no file of the caller, and no run of another user changes.

One user (`nobody`) owns runs, data and a folder open to all; another user runs hpcdl there. Each name that a command
writes is planted once as a link to a file of the caller, and once as a hard link to it if that differs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, CommandLine
from tests.security.conftest import TRAIN
from tests.security.users import CALLERS, ONLY_ROOT, PLANTER, Caller, environment_of, facts_below, give, refused

pytestmark = [ONLY_ROOT, pytest.mark.mpi]
STUDIES = ROOT / "tests" / "studies"
TUNE = ["tune-threads", "--model", "lenet", "--budget", "1s", "--max-samples", "1"]
SUBMIT = ["submit", "--", "train", "--model", "lenet", "--data", "synthetic:mnist@200", "--run-dir", "{shared}/run"]
SHARD = ["shard", "synthetic:mnist@40", "{shared}", "--split", "train=0.5,val=0.5"]
SWEEP = ["sweep", str(STUDIES / "five-hosts.toml"), "--only-nodes", "1", "--out", "{shared}"]
SEARCH = ["search", "{here}/search.toml", "--out", "{shared}"]
SEARCHED = 'trials = 1\n[space]\nlearning-rate = {low = 1e-3, high = 0.3}\n[train]\nmodel = "lenet"\nsteps = 2\n'


@dataclass(frozen=True)
class Scene:
    """Users and their files: `theirs` belongs to the planter, `here` and `secret` to the caller."""

    caller: Caller
    theirs: Path
    shared: Path

    @property
    def here(self) -> Path:
        """The caller's working directory."""
        return self.caller.home / "here"

    @property
    def secret(self) -> Path:
        """A folder of the caller with `file`, `folder/inside` and `empty`, the targets of the links."""
        return self.caller.home / "secret"

    def words(self, words: list[str]) -> list[str]:
        """Return `words` with the paths of this scene filled in."""
        run, study = self.theirs / "run", self.theirs / "study"
        names = {"run": run, "study": study, "data": self.theirs / "data", "shared": self.shared, "here": self.here}
        return [word.format_map({name: str(path) for name, path in names.items()}) for word in words]

    def plant(self, path: Path, kind: str = "link") -> None:
        """Plant a link, owned by the planter, to something of the caller."""
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in made:
            give(folder, PLANTER)
            folder.chmod(0o777)
        if kind == "hard":
            os.link(self.secret / "file", path)
        else:
            path.symlink_to(self.secret / {"link": "file"}.get(kind, kind))
            give(path, PLANTER)


@pytest.fixture(scope="module", params=CALLERS)
def caller(
    request: pytest.FixtureRequest, session_hpcdl: CommandLine, public: Path, programs: Path
) -> Iterator[Caller]:
    """A user who runs hpcdl and has valuable files."""
    home = public / request.param
    for folder in ("here", "secret/folder", "secret/empty"):
        (home / folder).mkdir(parents=True)
    for name in ("secret/file", "secret/folder/inside"):
        (home / name).write_text("years of work\n")
    (home / "here" / "search.toml").write_text(SEARCHED)
    one = Caller(request.param, home, environment_of(session_hpcdl, programs))
    yield one
    one.end()


@pytest.fixture(scope="module")
def programs(public: Path) -> Path:
    """A fake Slurm."""
    folder = public / "programs"
    folder.mkdir()
    for name, answer in (("sbatch", "4711"), ("squeue", "RUNNING"), ("scancel", "")):
        (folder / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def theirs(public: Path, trained: Path, data: Path) -> Path:
    """A run, data and a study of another user, writable by all, with links planted in them."""
    folder = public / PLANTER
    shutil.copytree(trained, folder / "run")
    shutil.copytree(data, folder / "data")
    shutil.copytree(STUDIES / "five-hosts" / "1-node", folder / "study")
    give(folder, PLANTER)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    return folder


@pytest.fixture
def scene(caller: Caller, theirs: Path, public: Path) -> Iterator[Scene]:
    """The caller and a new folder of the planter, writable by all; asserts that no file of the caller changes."""
    shared = public / "shared"
    shared.mkdir()
    give(shared, PLANTER)
    shared.chmod(0o777)
    one = Scene(caller, theirs, shared)
    before = facts_below(one.secret)
    yield one
    after = facts_below(one.secret)
    shutil.rmtree(shared)
    assert after == before


READING: dict[str, tuple[list[str], str]] = {
    "watch": (["watch", "{run}", "--once"], ""),
    "report": (["report", "{run}"], "report/report.html"),
    "report of several": (["report", "{study}", "--format", "md"], "report/report.md"),
    "trace": (["trace", "{run}"], ""),
    "trace to": (["trace", "{run}", "--html", "x.html", "--to", "chrome", "x.json.gz"], "x.html"),
    "checkpoints": (["checkpoints", "{run}"], ""),
    "diff": (["diff", "{run}", "{study}/runs/001-ring-1w-64b-r1"], ""),
    "runs": (["runs", "{study}/runs"], ""),
    "inspect": (["inspect", "{data}", "--verify"], ""),
    "inspect pictures": (["inspect", "{data}", "--samples", "2", "--show"], "data-data.html"),
    "predict": (["predict", "{study}", "--nodes", "1,2", "--network", "2us,12.5GB"], ""),
    "config": (["config", "show"], ""),
}
"""For each reading command: its words, and what it leaves in the caller's folder."""
REFUSED = {
    "grow": ["jobs", "grow", "{run}"],
    "evaluate": ["evaluate", "{run}", "--data", "{data}"],
    "infer": ["infer", "{run}", "--data", "{data}", "--out", "{here}/outputs"],
    "export": ["export", "{run}", "{here}/exported"],
    "resume": ["train", "--resume", "--run-dir", "{run}"],
}
"""Commands that refuse another user's run unless told explicitly."""
IN_RUN = (
    "ranks/watch/viewed", "ranks/watch/.viewed.1.tmp", "ranks/grow", "report/report.html", "report/report.md",
    "report/.report.html.1.tmp", "trace/.rank-0.trace.1.tmp", ".record.json.1.tmp", ".hpcdl-lock",
)  # fmt: skip


@pytest.fixture(scope="module")
def planted(caller: Caller, theirs: Path) -> Iterator[None]:
    """Plant links in the other user's run at every name that a reader might write."""
    scene = Scene(caller, theirs, theirs)
    for name in IN_RUN:
        scene.plant(theirs / "run" / name)
    yield
    for name in IN_RUN:
        (theirs / "run" / name).unlink()


@pytest.mark.long
@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("name", READING)
def test_who_reads_a_run_of_another_changes_nothing_in_it(scene: Scene, name: str) -> None:
    words, left = READING[name]
    before = facts_below(scene.theirs)
    finished = scene.caller(scene.words(words), scene.here)
    assert facts_below(scene.theirs) == before
    assert finished.code == 0, finished.err
    assert not left or (scene.here / left).is_file()


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_write_to_a_run_of_another_or_run_its_code_is_refused(scene: Scene, name: str) -> None:
    before = facts_below(scene.theirs)
    finished = scene.caller(scene.words(REFUSED[name]), scene.here)
    assert facts_below(scene.theirs) == before and not (scene.here / "exported").exists()
    assert refused(finished), finished.err


DONE: dict[str, tuple[list[str], list[str]]] = {
    "report": (
        ["report", "{study}", "--out", "{shared}"],
        [".hpcdl-outputs.json", ".report.html.1.tmp", ".report.json.1.tmp", "figures/.time-parts.svg.1.tmp"],
    ),
    "trace": (
        ["trace", "{run}", "--html", "{shared}/x.html", "--to", "chrome", "{shared}/x.gz"],
        [".x.html.1.tmp", ".x.gz.1.tmp", ".hpcdl-outputs.json"],
    ),
    "inspect": (
        ["inspect", "{data}", "--samples", "1", "--show", "--out", "{shared}"],
        [".hpcdl-outputs.json", ".data-data.html.1.tmp"],
    ),
    "predict": (
        ["predict", "{study}", "--nodes", "1,2", "--network", "2us,12.5GB", "--out", "{shared}"],
        [".hpcdl-outputs.json", ".predict.json.1.tmp"],
    ),
    "submit": (SUBMIT, ["run.job/.job.sh.1.tmp", "run.job/.hpcdl-outputs.json"]),
    "shard": ([*SHARD, "--resume"], [".manifest.json.1.tmp", "train/.shard-00000.h5.1.tmp", "manifest.partial.00000"]),
}
"""For each command with an output path: existing names that it may replace or write beside."""
DECLINED: dict[str, tuple[list[str], list[str]]] = {
    "report": (DONE["report"][0], ["report.html", "report.md", "report.json", "scaling.csv", "figures/time-parts.svg"]),
    "report of figures": ([*DONE["report"][0], "--figures"], ["figures/time-parts.png"]),
    "trace": (DONE["trace"][0], ["x.html", "x.gz"]),
    "inspect": (DONE["inspect"][0], ["data-data.html"]),
    "predict": (DONE["predict"][0], ["predict.json"]),
    "tune-threads": ([*TUNE, "--out", "{shared}/p.toml", "--log", "{shared}/p.jsonl"], ["p.toml", "p.jsonl"]),
    "submit": (SUBMIT, ["run.job/job.sh"]),
    "certify": (["certify", "--out", "{shared}"], ["card.json", "card.html"]),
    "shard": (SHARD, ["manifest.json", "train/shard-00000.h5", ".hpcdl-lock"]),
    "resumed shard": ([*SHARD, "--resume"], [".hpcdl-lock"]),
    "sweep": (SWEEP, ["study.json", "train.toml"]),
    "resumed sweep": ([*SWEEP, "--resume"], ["study.json", "train.toml", ".hpcdl-lock"]),
    "search": (SEARCH, ["search.json", "space.toml"]),
    "resumed search": ([*SEARCH, "--resume"], ["search.json", ".hpcdl-lock"]),
    "train": (
        [*TRAIN, "--run-dir", "{shared}"],
        ["run.toml", "record.json", "metrics.jsonl", "ranks/launcher.log", "model.keras", "trace/rank-0.trace"],
    ),
    "resumed train": ([*TRAIN, "--resume", "--run-dir", "{shared}"], ["run.toml", "record.json", ".hpcdl-lock"]),
}
"""The same for existing names that it refuses and leaves alone."""
LINKED = {
    "report": ["report", "{study}", "--out", "{shared}/x"],
    "trace": ["trace", "{run}", "--html", "{shared}/x/x.html"],
    "inspect": ["inspect", "{data}", "--show", "--samples", "1", "--out", "{shared}/x"],
    "predict": ["predict", "{study}", "--nodes", "1,2", "--out", "{shared}/x"],
    "tune-threads": [*TUNE, "--out", "{here}/p.toml", "--log", "{shared}/x/p.jsonl"],
    "tuned": [*TUNE, "--out", "{shared}/x/p.toml", "--log", "{here}/p.jsonl"],
    "submit": [word.replace("{shared}", "{shared}/x") for word in SUBMIT],
    "certify": ["certify", "--out", "{shared}/x"],
    "shard": [word.replace("{shared}", "{shared}/x") for word in SHARD],
    "sweep": [word.replace("{shared}", "{shared}/x") for word in SWEEP],
    "search": [word.replace("{shared}", "{shared}/x") for word in SEARCH],
    "train": [*TRAIN, "--run-dir", "{shared}/x"],
    "resumed train": [*TRAIN, "--resume", "--run-dir", "{shared}/x"],
    "deeper": ["report", "{study}", "--out", "{shared}/x/deeper/report"],
}
"""Commands whose folder {shared}/x is the planter's link to a folder of the caller."""


@pytest.mark.parametrize("name", DONE)
def test_names_that_others_could_guess_are_not_written_through(scene: Scene, name: str) -> None:
    words, names = DONE[name]
    for number, planted in enumerate(names):
        scene.plant(scene.shared / planted, ("link", "hard")[number % 2 and not planted.endswith(".json")])
    (scene.shared / "theirs.txt").touch()
    finished = scene.caller(scene.words(words), scene.here)
    assert finished.code == 0 or refused(finished), finished.err
    assert (scene.shared / "theirs.txt").exists()


@pytest.mark.parametrize(("name", "planted"), [(name, one) for name, (_, names) in DECLINED.items() for one in names])
def test_a_link_in_place_of_what_is_to_be_written_is_left_alone(scene: Scene, name: str, planted: str) -> None:
    """The command exits with 2 and leaves the link alone; a planted study state counts as damaged (3)."""
    for kind in ("link", "hard"):
        scene.plant(scene.shared / planted, kind)
        before = facts_below(scene.shared)
        finished = scene.caller(scene.words(DECLINED[name][0]), scene.here)
        assert refused(finished, (2, 3)), finished.err
        after = facts_below(scene.shared)
        assert {path: facts for path, facts in after.items() if path != "."}.keys() == before.keys() - {"."}
        assert all(after[path] == before[path] for path in (planted,))
        (scene.shared / planted).unlink()


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_that_another_has_linked_is_not_written_to(scene: Scene, name: str) -> None:
    scene.plant(scene.shared / "x", "empty")
    finished = scene.caller(scene.words(LINKED[name]), scene.here)
    assert refused(finished), finished.err
    assert not any((scene.secret / "empty").iterdir())


def test_a_job_is_cancelled_beside_a_link(scene: Scene) -> None:
    """`hpcdl cancel` works although its note against requeueing, in the job's folder, is a planted link."""
    words = [word.replace("{shared}/run", "{shared}/cancelled") for word in SUBMIT]  # another job may have the run
    submitted = scene.caller(scene.words(words), scene.here)
    assert submitted.code == 0, submitted.err
    scene.plant(scene.shared / "cancelled.job" / "cancelled")
    assert scene.caller(["cancel", "4711"], scene.here).code == 0
    assert (scene.shared / "cancelled.job" / "cancelled").is_file()


def test_a_study_where_others_plant_links_keeps_what_they_lead_to(scene: Scene) -> None:
    """A finished study of the caller, in a folder where others may write, keeps the targets of planted links."""
    folder = scene.shared / "study"
    shutil.copytree(scene.theirs / "study", folder)
    give(folder, scene.caller.name)
    folder.chmod(0o777)
    (folder / "train.toml").unlink()
    for name in ("train.toml", ".study.json.1.tmp", ".train.toml.1.tmp"):
        scene.plant(folder / name)
    words = [word.replace("{shared}", "{shared}/study") for word in SWEEP]
    finished = scene.caller(scene.words([*words, "--resume"]), scene.here)
    assert finished.code == 0 or refused(finished), finished.err
    shutil.rmtree(folder / "logs", ignore_errors=True)
    scene.plant(folder / "logs", "folder")
    assert refused(scene.caller(scene.words([*words, "--resume"]), scene.here))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("metrics.jsonl", "link"), ("ranks", "empty"), ("ranks", "folder"), ("checkpoints", "empty"),
     ("checkpoints", "folder"), ("trace", "folder"), (".hpcdl-lock", "link"), (".hpcdl-lock", "hard"),
     ("run.toml", "link"), ("ranks/launcher.log", "link")],
)  # fmt: skip
def test_a_run_of_the_caller_with_anothers_link_in_it_is_not_resumed(scene: Scene, name: str, kind: str) -> None:
    run = own_run(scene)
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    else:
        (run / name).unlink(missing_ok=True)
    scene.plant(run / name, kind)
    finished = scene.caller(["train", "--resume", "--run-dir", str(run), "--allow", "steps", "--steps", "9"], run)
    assert refused(finished, (2, 3) if name == "run.toml" else (2,)), finished.err
    assert (run / "record.json").read_bytes() == (scene.theirs / "run" / "record.json").read_bytes()


REPLACED = (
    "model.keras", "ranks/all.json", "ranks/watch/viewed", ".hpcdl-saved", ".hpcdl-data",
    ".run.toml.1.tmp", "checkpoints/.step-0000000009.tmp",
)  # fmt: skip


def test_a_resumed_run_writes_beside_links(scene: Scene) -> None:
    """A resumed run in a folder where others may write creates only new files, and link targets stay."""
    if scene.caller.name != CALLERS[0]:
        pytest.skip("one training is enough: the other user is held back by the same lines")
    run, copy = own_run(scene), scene.here / "copy"
    shutil.copytree(run, copy, copy_function=os.link)  # `cp -al`
    for name in REPLACED:
        (run / name).unlink(missing_ok=True)
        scene.plant(run / name, "folder" if name.startswith("checkpoints") else "link")
    before = facts_below(copy)
    finished = scene.caller(["train", "--resume", "--run-dir", str(run), "--allow", "steps", "--steps", "9"], run)
    assert finished.code == 0, finished.err
    after = facts_below(copy)
    shutil.rmtree(copy)
    assert after == before


def own_run(scene: Scene) -> Path:
    """Return a finished run of the caller in the open folder, writable by all."""
    run = scene.shared / "own"
    shutil.copytree(scene.theirs / "run", run)
    for name in IN_RUN:
        (run / name).unlink(missing_ok=True)
    give(run, scene.caller.name)
    return run

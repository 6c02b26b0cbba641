"""User files in hpcdl's output folders, also old ones, are neither replaced nor removed."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, CommandLine, finish
from tests.security.users import facts_below, refused
from tests.training_runs import wait_for

pytestmark = pytest.mark.mpi
STUDY = ROOT / "tests" / "studies" / "five-hosts" / "1-node"
OWN = "years of work\n"
SHARD = ["shard", "--split", "train=0.5,val=0.5", "--shards", "40"]


@dataclass(frozen=True)
class Output:
    """A command with an output path: its words, the files that it writes, and whether it may run twice."""

    words: tuple[str, ...]
    files: tuple[str, ...]
    again: bool = True


OUTPUTS = {
    "report": Output(
        ("report", "{study}", "--out", "{out}"),
        ("report.html", "report.md", "report.json", "scaling.csv"),
    ),
    "trace": Output(("trace", "{run}", "--html", "{out}/x.html", "--to", "chrome", "{out}/x.gz"), ("x.html", "x.gz")),
    "predict": Output(
        ("predict", "{study}", "--nodes", "1,2", "--network", "2us,12.5GB", "--out", "{out}"),
        ("predict.json",),
    ),
    "inspect": Output(
        ("inspect", "{data}", "--show", "--samples", "1", "--out", "{out}"), ("data-data.html", "train-*.png")
    ),
    "submit": Output(
        ("submit", "--", "train", "--model", "lenet", "--data", "synthetic:mnist@200",
         "--run-dir", "{out}/run"),
        ("run.job/job.sh",),
    ),
    "tune-threads": Output(
        ("tune-threads", "--model", "lenet", "--budget", "1s", "--out", "{out}/p.toml", "--log", "{out}/p.jsonl"),
        ("p.toml", "p.jsonl"),
        again=False,
    ),
    "export": Output(("export", "{run}", "{out}", "--to", "keras"), ("model.keras", "thesis.txt"), again=False),
    "certify": Output(("certify", "--out", "{out}"), ("card.html", "thesis.txt"), again=False),
}  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


class Asked:
    """The command line with a test's paths filled in, and a fake Slurm."""

    def __init__(self, hpcdl: CommandLine, folder: Path, **paths: Path) -> None:
        programs = folder / "programs"
        programs.mkdir()
        (programs / "sbatch").write_text("#!/bin/sh\necho 4711\n")
        (programs / "sbatch").chmod(0o755)
        self._hpcdl, self._paths = hpcdl, {name: str(path) for name, path in paths.items()}
        self._environment = {"PATH": f"{programs}:/usr/bin:/bin", "HPCDL_LAUNCHER": "slurm"}

    def __call__(self, words: tuple[str, ...]) -> Any:
        """Run the command and return how it ended."""
        played = self._environment if words[0] == "submit" else {}
        return self._hpcdl([word.format_map(self._paths) for word in words], env=played)


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_the_user_has_there_is_not_written_over(
    ask_hpcdl: CommandLine, trained: Path, data: Path, out: Path, tmp_path: Path, name: str
) -> None:
    """A user's file stops the command before it writes; running twice is fine, unless the user edits a file between."""
    output = OUTPUTS[name]
    asked = Asked(ask_hpcdl, tmp_path, study=STUDY, run=trained, data=data, out=out)
    for file in output.files:
        if "*" in file:
            continue
        (out / file).parent.mkdir(exist_ok=True)
        (out / file).write_text(OWN)
        before = facts_below(out)
        assert refused(finished := asked(output.words)), finished.err
        assert facts_below(out) == before
        (out / file).unlink()
    if not output.again:
        return
    for _ in range(2):
        assert (finished := asked(output.words)).code == 0, finished.err
    for pattern in output.files:
        (file,) = out.glob(pattern)
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        before = facts_below(out)
        assert refused(finished := asked(output.words)), finished.err
        assert facts_below(out) == before
        file.write_bytes(content)


def test_files_in_a_data_folder_stay(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A user's file in a split stays, even one that looks temporary, and a stopped writer's shards are resumed."""
    folder = tmp_path / "data"
    words = [*SHARD, "synthetic:mnist@60000", folder, "--workers", "1"]
    process = run_hpcdl.start(words)
    wait_for(lambda: any(folder.glob("train/*.h5")) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    own = [folder / name for name in ("train/.x.tmp", "val/.x.tmp", ".x.tmp", "train/thesis.txt", "thesis.txt")]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text(OWN)
    finished = run_hpcdl([*words, "--resume"])
    assert finished.code == 0, finished.err
    assert {path.read_text() for path in own} == {OWN}


@pytest.mark.parametrize("command", ["shard", "repair"])
def test_files_in_the_work_folder_stay(ask_hpcdl: CommandLine, data: Path, tmp_path: Path, command: str) -> None:
    folder = Path(shutil.copytree(data, tmp_path / "data"))
    words = ["inspect", folder, "--repair", "--from", "synthetic:mnist@40"]
    if command == "shard":
        (folder / "manifest.json").unlink()
        (folder / "manifest.partial.00000").touch()
        words = ["shard", "synthetic:mnist@40", folder, "--split", "train=0.5,val=0.5", "--resume"]
    else:
        shard = folder / "train" / "shard-00000.h5"
        shard.write_bytes(shard.read_bytes()[:-64] + bytes(range(64)))
    (folder / ".hpcdl-work").mkdir(mode=0o700)
    (folder / ".hpcdl-work" / "thesis.txt").write_text(OWN)
    finished = ask_hpcdl(words)
    assert refused(finished) and "thesis.txt" in finished.err, finished.err
    assert (folder / ".hpcdl-work" / "thesis.txt").read_text() == OWN
    (folder / ".hpcdl-work" / "thesis.txt").rename(tmp_path / "thesis.txt")
    (folder / ".hpcdl-work" / "names").touch()  # left by a killed writer
    finished = ask_hpcdl(words)
    assert finished.code == 0 and not (folder / ".hpcdl-work").exists(), finished.err

"""`hpcdl sweep --for TEMPLATE` writes the study for a centre's evidence, and a sweep accepts it unchanged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcdl.config.study import load_study
from hpcdl.core.errors import UsageError
from hpcdl.core.records.run_record import read_record
from hpcdl.report.evidence.template import find_template
from hpcdl.study.access import node_counts_for, train_words
from tests.conftest import ROOT, CommandLine

STUDY = ["--model", "lenet", "--data", "synthetic:mnist", "--global-batch", "640", "--set", "steps=20"]


@pytest.mark.parametrize(
    ("name", "target", "counts"),
    [
        ("csc-roihu-large", 40, [10, 20, 40]),
        ("csc-roihu-large", 60, [15, 30, 60]),
        ("csc-roihu-large", 7, [3, 5, 7]),
        ("csc-roihu-gpularge", 3, [1, 2, 3]),
        ("ncar-derecho", 64, [8, 16, 32, 64]),
        ("archie-west", 2, [1, 2]),
    ],
)
def test_numbers_of_nodes_reach_the_target(name: str, target: int, counts: list[int]) -> None:
    assert node_counts_for(find_template(name), target) == counts


@pytest.mark.parametrize(("target", "words"), [(61, "takes jobs of 6 to 60 nodes"), (5, "takes jobs of 6 to 60 nodes")])
def test_a_target_fits_the_partition(target: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        node_counts_for(find_template("csc-roihu-large"), target)


def test_too_few_nodes_for_so_many_points() -> None:
    with pytest.raises(UsageError, match="ask for 3 nodes or more"):
        node_counts_for(find_template("own"), 2)


def test_the_study_is_one_that_a_sweep_takes(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = ask_hpcdl(["sweep", "--for", "csc-roihu-large", "--target", "40", *STUDY], cwd=tmp_path)
    assert finished.code == 0, finished.err
    assert "15 runs on 10, 20, 40 nodes" in finished.out
    assert "hpcdl report studies/evidence-csc-roihu-large --for csc-roihu-large --target 40" in finished.err
    study = load_study(tmp_path / "evidence-csc-roihu-large.toml", {})
    assert study.plan.mode == "strong" and study.plan.repeats == 5
    assert [*study.matrices[0].shape.nodes] == [10, 20, 40] and study.train["steps"] == 20, "a number, not text"
    planned = ask_hpcdl(["sweep", "evidence-csc-roihu-large.toml", "--dry-run", "--json"], cwd=tmp_path)
    assert planned.code == 0 and len(planned.json()["runs"]) == 15
    assert not (tmp_path / "studies").exists(), "nothing was started"


def test_what_the_user_says_stays(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = ["sweep", "--for", "own", "--nodes", "2,4,8", "--repeats", "4", "--name", "mine", *STUDY, "--json"]
    finished = ask_hpcdl(line, cwd=tmp_path)
    assert finished.code == 0, finished.err
    assert finished.json() == {"study": "mine.toml", "name": "mine", "nodes": [2, 4, 8], "runs": 12}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--for", "own", *STUDY], "add --target NODES"),
        (["--for", "own", "--target", "4", "--mode", "weak", *STUDY], "asks for strong scaling"),
        (["--for", "own", "--target", "4", "--jobs", *STUDY], "leave --jobs out"),
        (["--for", "ncar-derecho", "--target", "7", *STUDY], "no run on 6, 7 nodes is possible"),
        (["--target", "4", *STUDY], "give --for TEMPLATE too"),
        (["--for", "own", "--target", "4", *STUDY[:4]], "list global-batch"),
    ],
)
def test_mistakes_write_nothing(ask_hpcdl: CommandLine, tmp_path: Path, arguments: list[str], words: str) -> None:
    finished = ask_hpcdl(["sweep", *arguments], cwd=tmp_path)
    assert finished.code == 2 and words in finished.err, finished.err
    assert not [*tmp_path.glob("*.toml")] and not (tmp_path / "studies").exists()


def test_a_file_of_somebody_else_stays(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("# mine\n")
    line = ["sweep", "--for", "own", "--target", "4", "--name", "mine", *STUDY]
    assert ask_hpcdl(line, cwd=tmp_path).code == 2
    assert (tmp_path / "mine.toml").read_text() == "# mine\n"


def test_the_script_has_the_settings_of_the_run() -> None:
    run = ROOT / "docs" / "example-report" / "study" / "runs" / "002-ring-2w-128b-r1"
    words = train_words(read_record(run))
    assert words[:2] == ["--model", "lenet"] and "--epochs" in words and "--learning-rate" in words
    assert not {"--ranks", "--run-dir", "--seed", "--momentum"} & {*words}, "defaults, and what a new job chooses"


def test_the_script_leaves_out_what_the_run_did_not_use() -> None:
    """A site's file may set these for all runs; `hpcdl train` refuses them as flags."""
    record = read_record(ROOT / "docs" / "example-report" / "study" / "runs" / "002-ring-2w-128b-r1")
    unused = {"momentum": 0.5, "optimizer": "sgd", "mtbf": 3600.0, "local-checkpoint-folder": "/nvme"}
    words = train_words(dataclasses.replace(record, config={**record.config, **unused}))
    assert not {"--momentum", "--mtbf", "--local-checkpoint-folder"} & {*words}
    used = {**unused, "optimizer": "momentum", "checkpoint-every": "auto", "elastic": True, "local-checkpoint-every": 5}
    words = train_words(dataclasses.replace(record, config={**record.config, **used}))
    assert {"--momentum", "--mtbf", "--local-checkpoint-folder"} <= {*words}

"""Scaling evidence for a computing centre: templates, verdicts on known numbers, and the document for users."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.errors import ConfigError, UnknownNameError, UsageError
from hpcdl.core.records.run_record import RunRecord
from hpcdl.report.analysis.scaling import build_curves
from hpcdl.report.evidence.checks import (
    MET,
    NOT_MEASURED,
    NOT_MET,
    NOT_SHOWN,
    Case,
    Judgement,
    choose_curve,
    judge,
    measure,
)
from hpcdl.report.evidence.template import CHECKS, find_template, read_template, template_names
from tests.conftest import ROOT, CommandLine
from tests.report.synthetic import NOISE, as_run, make_record, write_run

EXAMPLE = ROOT / "docs" / "example-report" / "study"
JOB = {"SLURM_JOB_ID": "4711", "OMP_NUM_THREADS": "2"}
RULE = '[source]\nurl = "https://example.org/"\nread = 2026-01-02\n'


def record(nodes: int, wall_s: float, **changes: Any) -> RunRecord:
    """Return a record of 50 steps of 96 samples on `nodes` nodes, in strong scaling."""
    values = {
        "mode": "strong", "batch_per_rank": 96 // nodes, "seconds_total": wall_s, "data_checksum": "abc",
        "environment": JOB, "machine": "roihu",
    }  # fmt: skip
    return make_record(nodes, 50 * 96 / wall_s, **(values | changes))


def study(walls: dict[int, float], noise: tuple[float, ...] = NOISE, **changes: Any) -> dict[str, RunRecord]:
    """Return repeats at each number of nodes, with these mean wall times in seconds."""
    return {
        f"{nodes}n-r{repeat}": record(nodes, wall_s * factor, repeat=repeat, **changes)
        for nodes, wall_s in walls.items()
        for repeat, factor in enumerate(noise)
    }


def placed(item: RunRecord, processors: str = "0-3,8") -> RunRecord:
    """Return the record with the processors of its ranks filled in."""
    ranks = [dataclasses.replace(rank, processors=processors) for rank in item.rank_records]
    return dataclasses.replace(item, rank_records=ranks)


def findings(records: dict[str, RunRecord], name: str = "csc-roihu-large", **changes: Any) -> dict[str, Judgement]:
    """Return the verdict of each check of a template."""
    template = find_template(name)
    runs = [as_run(item, name) for name, item in records.items()]
    label, curve = choose_curve(build_curves(runs))
    measured = measure(label, curve, records, template.time)
    return {item.criterion.check: item for item in judge(Case(template=template, measured=measured, **changes))}


def busy(item: RunRecord, *shares: float | None) -> RunRecord:
    """Return the record with these GPU utilisations of its workers, in turn."""
    ranks = [
        dataclasses.replace(rank, gpu_utilisation=shares[place % len(shares)])
        for place, rank in enumerate(item.rank_records)
    ]
    return dataclasses.replace(item, rank_records=ranks)


LINEAR = {2: 120.0, 4: 62.0, 8: 33.0}


@pytest.mark.parametrize("name", template_names())
def test_every_template_that_is_installed_is_whole(name: str) -> None:
    template = find_template(name)
    assert template.name == name and template.criteria and template.repeats >= 2
    for criterion in template.criteria:
        assert criterion.source.url.startswith("https://") and re.fullmatch(r"2\d{3}-\d\d-\d\d", criterion.source.read)
        assert len(criterion.says.split()) >= 2


def test_every_check_is_used_by_a_template_and_explained() -> None:
    used = {item.check for name in template_names() for item in find_template(name).criteria}
    page = (ROOT / "docs" / "reference" / "evidence.md").read_text()
    assert used == {*CHECKS} and not [check for check in CHECKS if f"`{check}`" not in page]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RULE, "no [[criterion]]"),
        ('[[criterion]]\ncheck = "wall-times"\nsays = "x"\n', "[source] is missing"),
        (RULE + '[[criterion]]\ncheck = "wall-time"\nsays = "x"\n', "unknown check 'wall-time'; did you mean"),
        (RULE + '[[criterion]]\ncheck = "efficiency"\nsays = "x"\n', "needs a number above 0"),
        (RULE + '[[criterion]]\ncheck = "efficiency"\nat-least = 75\nsays = "x"\n', "more than 100 %"),
        (RULE + '[[criterion]]\ncheck = "wall-times"\nat-least = 3\nsays = "x"\n', "takes no at-least"),
        (RULE + '[[criterion]]\ncheck = "attached"\nsays = "x"\n', "names an attachment"),
        (RULE + '[[criterion]]\ncheck = "attached"\nattachment = "a"\nsays = "x"\n', "unknown attachment 'a'"),
        (RULE + '[[criterion]]\ncheck = "wall-times"\nsay = "x"\n', "unknown key 'say'; did you mean 'says'"),
        ('[source]\nurl = "a book"\nread = 2026-01-02\n', "write the address of the page"),
        ('[source]\nurl = "https://a.org/"\nread = "lately"\n', "the day on which the page was read"),
        ("nodes = [6]\n" + RULE, "fewest and the most nodes"),
        ("repeats = 0\n" + RULE, "whole number from 1 on"),
        ('time = "cpu"\n' + RULE, "not one of total, steps"),
    ],
)
def test_a_template_says_what_is_wrong_with_it(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_template(path)
    assert words in str(caught.value) and "title is missing" in str(caught.value)


def test_a_site_has_templates_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCDL_SITE_CONFIG", str(tmp_path / "site.toml"))
    (tmp_path / "evidence").mkdir()
    text = (ROOT / "share" / "hpcdl" / "evidence" / "own.toml").read_text()
    (tmp_path / "evidence" / "ours.toml").write_text(text.replace("a centre of your own", "ours"))
    assert find_template("ours").title == "ours" and "ours" in template_names() and "own" in template_names()
    with pytest.raises(UnknownNameError, match="did you mean 'ours'"):
        find_template("our")


def test_a_good_study_meets_what_its_records_can_show() -> None:
    found = findings(study(LINEAR), target=8, script="#SBATCH --nodes=8\n", script_source="of the job")
    assert {name: item.verdict for name, item in found.items()} == {
        "node-counts": MET, "reaches-target": MET, "same-input": MET, "efficiency": MET, "wall-times": MET,
        "on-machine": MET, "ran-as-jobs": MET, "batch-script": MET, "attached": NOT_MEASURED,
    }  # fmt: skip
    # Computed by hand: 120 / 62 / 2 and 120 / 33 / 4.
    assert "4 nodes 96.8 % [" in found["efficiency"].measured and "8 nodes 90.9 % [" in found["efficiency"].measured


def test_placement_is_met_where_every_record_states_it() -> None:
    records = study({1: 120.0, 2: 62.0, 4: 33.0})
    assert findings(records, "own")["placement"].verdict == NOT_MEASURED
    reported = {name: placed(item) for name, item in records.items()}
    found = findings(reported, "own")["placement"]
    assert (found.verdict, found.measured) == (MET, "recorded: a rank on 5 processors of its node")
    one = findings({name: placed(item, "3") for name, item in records.items()}, "own")["placement"]
    assert one.measured == "recorded: a rank on 1 processor of its node"
    one = next(iter(reported))
    assert findings({**reported, one: records[one]}, "own")["placement"].verdict == NOT_MEASURED


def test_how_busy_gpus_were_is_recorded_or_attached() -> None:
    records = study({1: 120.0, 2: 62.0, 4: 33.0})
    found = findings(records, "csc-roihu-gpularge")["gpu-utilisation"]
    assert found.verdict == NOT_MEASURED and "--attach gpu-utilisation=FILE" in found.measured
    used = {name: busy(item, 0.9, 0.8) for name, item in records.items()}
    found = findings(used, "csc-roihu-gpularge")["gpu-utilisation"]
    # Five runs each of 1, 2 and 4 workers: (0.9 + 0.9 + 0.8 + 0.9 + 0.8 + 0.9 + 0.8) / 7.
    assert (found.verdict, found.measured) == (MET, "recorded: 85.7 % in the mean, 80.0 % on the least busy GPU")
    one = next(iter(used))
    used[one] = busy(records[one], None)
    assert findings(used, "csc-roihu-gpularge")["gpu-utilisation"].verdict == NOT_MEASURED


@pytest.mark.parametrize(
    ("last_s", "noise", "verdict"),
    [
        (36.0, NOISE, MET),  # 83 %
        (40.0, NOISE, NOT_SHOWN),  # 75.0 %, but the interval includes the limit
        (40.0, (1.0,), NOT_SHOWN),  # measured once
        (36.0, (1.0,), NOT_SHOWN),  # measured once, so even a good value is not shown
        (50.0, NOISE, NOT_MET),  # 60 %
    ],
)
def test_an_efficiency_is_shown_or_not(last_s: float, noise: tuple[float, ...], verdict: str) -> None:
    assert findings(study({2: 120.0, 4: 62.0, 8: last_s}, noise))["efficiency"].verdict == verdict


def test_points_beyond_the_target_do_not_count() -> None:
    walls = {2: 120.0, 4: 62.0, 8: 100.0}
    assert findings(study(walls))["efficiency"].verdict == NOT_MET
    found = findings(study(walls), target=4)
    assert found["efficiency"].verdict == MET and found["node-counts"].verdict == NOT_MET
    assert findings(study(walls), target=16)["reaches-target"].verdict == NOT_MET
    assert findings(study(walls))["reaches-target"].verdict == NOT_MEASURED


def test_an_emulated_study_meets_nothing_of_real_nodes() -> None:
    found = findings(study(LINEAR, model="emulated:lenet:100ms"), target=8)
    for check in ("node-counts", "reaches-target", "efficiency", "wall-times", "ran-as-jobs", "on-machine"):
        assert found[check].verdict == NOT_MET and "emulated" in found[check].measured


def test_weak_scaling_is_no_efficiency_of_strong() -> None:
    records = study(LINEAR, mode="weak", batch_per_rank=32)
    found = findings(
        {name: dataclasses.replace(item, global_batch=32 * item.workers) for name, item in records.items()}
    )
    assert found["efficiency"].verdict == NOT_MEASURED and "weak scaling" in found["efficiency"].measured


def test_a_resumed_run_has_no_wall_time() -> None:
    records = study(LINEAR)
    records["4n-r1"] = dataclasses.replace(records["4n-r1"], resumed_from_steps=(20,))
    found = findings(records)
    assert found["wall-times"].verdict == found["efficiency"].verdict == NOT_MEASURED
    assert "4 nodes" in found["wall-times"].measured


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"data_checksum": ""}, NOT_MEASURED),
        ({"data_checksum": "synthetic:mnist#1"}, NOT_MET),  # the other records are of a folder
        ({"data_checksum": "other"}, NOT_MET),
    ],
)
def test_other_input_is_seen(changes: dict[str, Any], verdict: str) -> None:
    records = study(LINEAR)
    records["8n-r0"] = dataclasses.replace(records["8n-r0"], **changes)
    assert findings(records)["same-input"].verdict == verdict


def test_seeds_of_synthetic_data_are_no_other_input() -> None:
    records = study(LINEAR)
    records = {
        name: dataclasses.replace(item, data_checksum=f"synthetic:mnist#{item.repeat}")
        for name, item in records.items()
    }
    assert findings(records)["same-input"].verdict == MET


def test_jobs_of_every_batch_system_count() -> None:
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        found = findings(study(LINEAR, environment={variable: "7"}), target=8)
        assert found["ran-as-jobs"].verdict == MET, variable


def test_what_no_record_says_is_not_measured() -> None:
    found = findings(study(LINEAR, environment={}, machine="node*"), script="#!/bin/bash\n")
    assert [found[name].verdict for name in ("ran-as-jobs", "on-machine", "batch-script")] == [NOT_MEASURED] * 3


def test_half_empty_nodes_are_no_base() -> None:
    """A half-empty node is not used as base: it would make every other point look twice as good."""
    records = study(LINEAR, ranks_per_node=1)
    half = {
        name.replace("2n", "half"): dataclasses.replace(
            item, workers=1, ranks=1, seconds_total=240.0, images_per_second=20.0, batch_per_rank=96
        )
        for name, item in records.items()
        if name.startswith("2n")
    }
    assert findings({**half, **records})["efficiency"].measured == findings(records)["efficiency"].measured


def test_steps_alone_count_where_the_centre_says_so() -> None:
    """If the centre counts steps only, a start-up of 60 s in the wall time does not change the efficiency."""
    template = find_template("archie-west")
    assert template.time == "steps" and find_template("csc-roihu-large").time == "total"
    records = {
        name: dataclasses.replace(item, seconds_total=(item.seconds_total or 0) + 60)
        for name, item in study(LINEAR).items()
    }
    runs = [as_run(item, name) for name, item in records.items()]
    _, curve = choose_curve(build_curves(runs))
    values = {time: measure("ring", curve, records, time).points[-1].efficiency for time in ("total", "steps")}
    assert values["steps"] is not None and values["steps"].value == pytest.approx(120 / 33 / 4, rel=1e-3)
    assert values["total"] is not None and values["total"].value == pytest.approx(180 / 93 / 4, rel=1e-2)


def test_several_curves_are_asked_about() -> None:
    records = study(LINEAR) | {f"tree-{name}": item for name, item in study(LINEAR, strategy="tree").items()}
    curves = build_curves([as_run(item, name) for name, item in records.items()])
    with pytest.raises(UsageError, match="2 curves, and a centre asks for one: ring, tree; choose with --curve ring"):
        choose_curve(curves)
    assert choose_curve(curves, "tree")[1].first.strategy == "tree"
    runs = [as_run(item, f"o-{name}") for name, item in study(LINEAR, software={"mpi": "Open MPI 4"}).items()]
    runs += [as_run(item, f"m-{name}") for name, item in study(LINEAR, software={"mpi": "MPICH 5"}).items()]
    with pytest.raises(
        UsageError, match="for one: 'ring, with MPICH 5', 'ring, with Open MPI 4'; choose with --curve 'ring"
    ):
        choose_curve(build_curves(runs))
    with pytest.raises(UnknownNameError, match="unknown curve 'three'; did you mean 'tree'"):
        choose_curve(curves, "three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("evidence") / "study"
    for name, item in study(LINEAR, config={"model": "lenet", "strategy": "ring", "data": "shards"}).items():
        write_run(where / name, placed(item))
    return where


def test_the_document_is_whole(ask_hpcdl: CommandLine, folder: Path, tmp_path: Path) -> None:
    affinity = tmp_path / "affinity.txt"
    affinity.write_text("Process 1 level 1 thread 000 affinity 0-3\n")
    out = tmp_path / "out"
    line = ["report", folder, "--for", "csc-roihu-large", "--target", "8", "--attach", f"affinity={affinity}"]
    finished = ask_hpcdl([*line, "--out", out])
    assert finished.code == 0, finished.err
    assert re.search(r"^efficiency +met ", finished.out, re.MULTILINE)
    assert {path.name for path in out.iterdir()} >= {
        "evidence.html",
        "evidence.md",
        "evidence.json",
        "job.sh",
        "figures",
    }
    page, text = (out / "evidence.html").read_text(), (out / "evidence.md").read_text()
    for document in (page, text):
        for words in (
            "docs.csc.fi",
            "affinity 0-3",
            "2m 00s",
            "What you add",
            "--model lenet",
            "not recorded",
            "0-3,8",
        ):
            assert words in document, words
    assert "<svg" in page and "(figures/evidence-efficiency.svg)" in text
    assert "<script" not in page
    again = ask_hpcdl([*line, "--out", out, "--json"])
    assert again.code == 0 and again.json()["target_nodes"] == 8
    assert [row["nodes"] for row in again.json()["scaling"]] == [2, 4, 8]


def test_an_emulated_document_says_so_first(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    for name, item in study(LINEAR, model="emulated:lenet:100ms").items():
        write_run(tmp_path / "study" / name, item)
    finished = ask_hpcdl(["report", "study", "--for", "own", "--out", "out"], cwd=tmp_path)
    assert finished.code == 0 and finished.out.startswith("Emulated computing, no measurement")
    assert (tmp_path / "out" / "evidence.md").read_text().startswith("# Emulated computing, no measurement")


def test_real_records_of_one_node_meet_no_scaling(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = ask_hpcdl(["report", EXAMPLE, "--for", "own", "--curve", "ring", "--json"], cwd=tmp_path)
    verdicts = {item["check"]: item["verdict"] for item in finished.json()["criteria"]}
    assert verdicts["node-counts"] == NOT_MET and verdicts["efficiency"] == NOT_MEASURED
    assert verdicts["repeats"] == verdicts["same-input"] == verdicts["wall-times"] == MET


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--for", "csc"], "unknown evidence template 'csc'"),
        (["--for", "absent.toml"], "no such config file: absent.toml"),
        (["--for", "own", "--compare", "machine"], "--compare does not go with --for own"),
        (["--for", "own", "--anonymous"], "--anonymous does not go with --for own"),
        (["--for", "own", "--format", "csv"], "--format csv: a centre's document is written as html, md, json"),
        (["--for", "own", "--target", "1"], "these runs are on 2 nodes and more"),
        (["--for", "own", "--attach", "affinity"], "write --attach KIND=FILE; kinds: affinity"),
        (["--for", "own", "--attach", "afinity=x"], "unknown attachment 'afinity'; did you mean 'affinity'"),
        (["--for", "own", "--attach", "affinity=absent"], "cannot read absent"),
        (["--for", "own", "--attach", "affinity=other"], "other does not hold 'affinity'"),
        (["--target", "4"], "--target belongs to a centre's document; give --for TEMPLATE too"),
        (["--for", "own", "--out", "other"], "--out other is a file"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    ask_hpcdl: CommandLine, folder: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "other").write_text("nothing of the kind\n")
    finished = ask_hpcdl(["report", folder, *arguments], cwd=here)
    assert finished.code == 2 and words in finished.err, finished.err
    assert len(finished.err.splitlines()) == 1 and [path.name for path in here.iterdir()] == ["other"]

"""`hpcdl sweep --predict` estimates a study's cost from earlier runs or facts, starts nothing and marks guesses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.predict.network import read_network
from hpcdl.report.runs.run import Run
from hpcdl.study.cost import START, Known, StudyCost, predict_cost
from hpcdl.study.points import prepare_points
from hpcdl.study.state import StudyState, new_state
from tests.conftest import ROOT, CommandLine
from tests.predict.clusters import SEED, make_cluster, study, true_step, write_study
from tests.predict.test_forms import runs_of
from tests.predict.test_forms import true_step as coded_step
from tests.study.studies import small_study

CLUSTER = make_cluster(SEED)
ASKED = {"model": CLUSTER.model, "data": "synthetic:cifar10", "workers": "8,16", "ranks_per_node": 1,
         "strategy": "ring,ps", "servers": CLUSTER.num_servers, "batch_size": CLUSTER.batch}  # fmt: skip


def predicted(
    earlier: list[Run], state: StudyState | None = None, network: str = "", compress: str = "none", **changes: Any
) -> StudyCost:
    wanted, plan = small_study(**{**ASKED, **changes})
    wanted = dataclasses.replace(wanted, train={"steps": 100, "compress": compress})
    checked, run_plan = prepare_points(wanted, plan)
    known = Known(runs=earlier, network=read_network(network) if network else None)
    return predict_cost(wanted, checked, run_plan, state or new_state(wanted, checked), known)


def test_points_cost_what_the_cluster_takes() -> None:
    found = predicted(study(CLUSTER))
    assert len(found.points) == 4 and {item.runs for item in found.points} == {2}
    for item in found.points:
        true = sum(true_step(CLUSTER, item.point.strategy, item.point.workers, 5).values())
        assert item.step_seconds.low < true < item.step_seconds.high
        assert item.seconds.mean == pytest.approx(START.mean + 100 * item.step_seconds.mean)
        assert item.node_hours.mean == pytest.approx(item.point.nodes * item.seconds.mean / 3600)
    assert found.node_hours.mean == pytest.approx(sum(2 * item.node_hours.mean for item in found.points))
    assert found.node_hours.low < found.node_hours.mean < found.node_hours.high
    assert found.num_runs == 8 and "36 runs on 1, 2, 4 workers by" in found.evidence[0]


def test_settings_of_the_study_count() -> None:
    """Predictions use the study's settings: fp16 halves the bytes on a slow network, although no run had it."""
    slow = study(make_cluster(4))  # AlexNet
    asked = {"model": "alexnet", "data": "synthetic:imagenet", "strategy": "ring", "servers": 1, "workers": "16",
             "batch_size": make_cluster(4).batch, "ranks_per_node": 1}  # fmt: skip
    whole, halved = (
        predicted(slow, compress=compress, **asked).points[0].step_seconds.mean for compress in ("none", "fp16")
    )
    assert halved < whole


def test_a_compressed_point_is_named_and_the_others_are_predicted() -> None:
    wanted, plan = small_study(**{**ASKED, "strategy": "ring", "servers": 1})
    wanted = dataclasses.replace(wanted, train={"steps": 100})
    checked, run_plan = prepare_points(wanted, plan)
    one, other = checked.points
    config = run_plan[other.number].config
    compressed = dataclasses.replace(config, exchange=dataclasses.replace(config.exchange, compress="topk:1%"))
    run_plan = {**run_plan, other.number: dataclasses.replace(run_plan[other.number], config=compressed)}
    cost = predict_cost(wanted, checked, run_plan, new_state(wanted, checked), Known(runs=study(CLUSTER)))
    assert [item.point.number for item in cost.points] == [one.number] and cost.num_runs == 2
    (line,) = [text for text in cost.warnings if "not predicted" in text]
    assert line.startswith("2 runs not predicted and in no total") and f"{other.label} (--compress topk:1%)" in line
    with pytest.raises(UsageError, match=r"no cost can be predicted: all points have --compress int8, .*leave it out"):
        predicted(study(CLUSTER), compress="int8", strategy="ring", servers=1)


def test_a_compressed_point_is_predicted_from_runs_that_have_its_form() -> None:
    earlier = [*study(CLUSTER), *runs_of(CLUSTER, "int8", 1e-8)]
    cost = predicted(earlier, compress="int8", strategy="ring", servers=1)
    assert [item.point.workers for item in cost.points] == [8, 16] and not any("not pre" in x for x in cost.warnings)
    for item in cost.points:
        assert item.marks == ()
        assert item.step_seconds.low < coded_step(CLUSTER, "int8", item.point.workers, 5, 1e-8) < item.step_seconds.high
    other = predicted(earlier, compress="int8", strategy="tree", servers=1).points[0]
    assert other.marks == ("strategy not measured",)
    own = cost.points[0].step_seconds
    assert other.step_seconds.high / other.step_seconds.low > own.high / own.low


def test_what_is_finished_costs_no_more_and_states_what_a_start_takes() -> None:
    wanted, plan = small_study(**ASKED)
    state = new_state(wanted, plan)
    first = next(run for run in plan.runs if run.point.strategy == "ring" and run.point.workers == 8)
    before = predicted(study(CLUSTER))
    step = next(item for item in before.points if item.point.number == first.point.number).step_seconds.mean
    after = predicted(study(CLUSTER), state.changed(first.name, status="finished", seconds=100 * step + 40.0))
    assert after.num_runs == before.num_runs - 1
    own = next(item for item in after.points if item.point.number == first.point.number)
    assert own.runs == 1 and own.seconds.mean == pytest.approx(100 * step + 40.0)


def test_facts_are_a_wider_guess_and_say_so() -> None:
    guess, measured = predicted([], network="omni-path"), predicted(study(CLUSTER))
    wide, narrow = (item.points[0].step_seconds for item in (guess, measured))
    assert wide.high / wide.low > 1.5 * narrow.high / narrow.low
    assert "nothing measured" in guess.points[0].marks and "guessed" in guess.warnings[0]


def test_emulated_computing_needs_no_run_but_a_network() -> None:
    asked = {"model": "emulated:cifar10-quick:0.5s", "strategy": "ring", "servers": 1, "workers": "4"}
    (item,) = predicted([], network="1us,100GB", **asked).points
    assert item.step_seconds.mean == pytest.approx(0.5, rel=0.1)


def test_without_evidence_all_that_is_missing_is_reported() -> None:
    with pytest.raises(UsageError, match=r"of cifar10-quick there is no run: .*--evidence.*--network"):
        predicted([])
    with pytest.raises(UsageError, match="nothing shows what an exchange costs"):
        predicted(study(CLUSTER, sizes=(1,)))


def test_a_network_of_ones_own_is_counted_and_the_guess_marked() -> None:
    own = f"{ROOT / 'share' / 'hpcdl' / 'examples' / 'my_model.py'}:build"
    cost = predicted([], network="omni-path", model=own, data="synthetic:mnist")
    assert "nothing measured" in cost.points[0].marks and "guessed" in cost.warnings[0]


MATRIX = ["--model", CLUSTER.model, "--data", "synthetic:cifar10", "--workers", "8", "--ranks-per-node", "1",
          "--strategy", "ring,ps", "--batch-size", str(CLUSTER.batch), "--set", "steps=100"]  # fmt: skip


def test_the_command_states_the_cost_and_writes_nothing(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    earlier = write_study(tmp_path / "pilot")
    line = ["sweep", *MATRIX, "--predict", "--evidence", earlier, "--out", tmp_path / "study"]
    shown = ask_hpcdl(line)
    assert shown.code == 0, shown.err
    assert "6 runs to go: " in shown.out and "node-hours [" in shown.out
    assert f"from {CLUSTER.model}: 18 runs on 1, 2, 4 workers by ps, ring" in shown.out
    document = ask_hpcdl([*line, "--json"]).json()
    assert document["runs"] == 6 and [row["runs"] for row in document["points"]] == [3, 3]
    for key in ("seconds", "node_hours"):
        assert 0 < document[key]["low"] < document[key]["mean"] < document[key]["high"]
    assert not (tmp_path / "study").exists() and not (ask_hpcdl.home / "studies").exists()
    beside = ask_hpcdl(["sweep", *MATRIX, "--predict", "--json", "--out", tmp_path / "pilot"]).json()
    assert beside["node_hours"] == document["node_hours"], "the runs below the study's own folder are evidence too"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--predict"], "there is no run"),
        (["--predict", "--evidence", "nowhere"], "nowhere is absent"),
        (["--predict", "--network", "1us,0"], "more than nothing"),
        (["--network", "aries"], "give --predict too"),
    ],
)
def test_no_cost_is_one_line(ask_hpcdl: CommandLine, words: list[str], says: str) -> None:
    finished = ask_hpcdl(["sweep", *MATRIX, *words])
    assert finished.code == 2 and says in finished.err
    assert len(finished.err.strip().splitlines()) == 1
    assert not (ask_hpcdl.home / "studies").exists()


EMULATED = "emulated:lenet:0.2s"


@pytest.mark.mpi
@pytest.mark.soak
def test_records_of_real_training_are_evidence(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Records of real training are evidence; the network's steps take their time on a busy machine too.

    predict/test_traced.py uses real records in every test run; this test calls the sweep command.
    """
    train = ["train", "--model", EMULATED, "--data", "synthetic:mnist@640", "--strategy", "ring", "--batch-size", "16",
             "--steps", "12", "--profile", "none"]  # fmt: skip
    for ranks in (1, 2):
        done = run_hpcdl([*train, "--ranks", str(ranks), "--run-dir", tmp_path / "runs" / str(ranks)])
        assert done.code == 0, done.err
    found = run_hpcdl(
        ["sweep", "--model", EMULATED, "--data", "synthetic:mnist@640", "--workers", "1,2,4", "--strategy", "ring",
         "--batch-size", "16", "--set", "steps=12", "--predict", "--evidence", tmp_path / "runs", "--json"]
    )  # fmt: skip
    assert found.code == 0, found.err
    rows = {row["workers"]: row for row in found.json()["points"]}
    assert set(rows) == {1, 2, 4} and found.json()["evidence"] == [f"{EMULATED}: 2 runs on 1, 2 workers by ring"]
    asked = run_hpcdl(["report", tmp_path / "runs", "--format", "json", "--out", tmp_path / "report", "--json"]).json()
    for point in asked["scaling"]:
        step = point["global_batch"] / point["images_per_second"]["mean"]
        assert rows[point["workers"]]["step_seconds"]["mean"] == pytest.approx(step, rel=0.3)

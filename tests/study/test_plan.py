from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.config.load import ResolvedConfig, all_settings
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import Setting
from hpcdl.config.study import Study, load_study, study_tables
from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.core.storage.files import write_toml
from hpcdl.run.plan import RunPlan
from hpcdl.study import points
from hpcdl.study.plan import StudyRuns, make_plan
from hpcdl.study.points import OWN, prepare_points
from tests.conftest import ROOT
from tests.study.studies import small_study


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(0, 99), st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True))
def test_every_turn_holds_every_point_once(repeats: int, seed: int, workers: list[int]) -> None:
    _, plan = small_study(repeats=repeats, order_seed=seed, workers=workers)
    num = len(workers)
    turns = [plan.runs[start : start + num] for start in range(0, len(plan.runs), num)]
    assert len(turns) == repeats
    for number, turn in enumerate(turns, start=1):
        assert sorted(run.point.workers for run in turn) == sorted(workers)
        assert {run.repeat for run in turn} == {number}
    assert len({run.name for run in plan.runs}) == len(plan.runs)


def test_the_order_is_random_and_comes_again() -> None:
    def order(seed: int) -> list[str]:
        return [run.name for run in small_study(workers=list(range(1, 9)), order_seed=seed)[1].runs]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:8] != [name.replace("-r2", "-r1") for name in order(1)[8:]]


def test_servers_come_on_top_of_workers() -> None:
    _, plan = small_study(strategy="ring,ps", workers="4", servers="1,2", ranks_per_node=2)
    shapes = [(p.strategy, p.ranks, p.workers, p.servers, p.nodes, p.ranks_per_node) for p in plan.points]
    assert shapes == [("ring", 4, 4, 0, 2, 2), ("ps", 5, 4, 1, 3, 2), ("ps", 6, 4, 2, 3, 2)]


def test_nodes_count_servers_too() -> None:
    _, plan = small_study(strategy="ring,ps", workers=None, nodes="1,2", ranks_per_node="1,2")
    shapes = [(p.strategy, p.nodes, p.ranks_per_node, p.workers) for p in plan.points]
    assert shapes == [
        ("ring", 1, 1, 1), ("ring", 1, 2, 2), ("ring", 2, 1, 2), ("ring", 2, 2, 4),
        ("ps", 1, 2, 1), ("ps", 2, 1, 1), ("ps", 2, 2, 3),
    ]  # fmt: skip
    assert any("needs at least one worker" in line for line in plan.left_out)


def test_strong_scaling_divides_the_global_batch() -> None:
    study = load_study(
        None,
        {"model": "lenet", "data": "synthetic:mnist", "mode": "strong", "workers": "1,2,3,4", "global-batch": "64"},
    )
    plan = make_plan(study)
    assert [(p.workers, p.batch_size) for p in plan.points] == [(1, 64), (2, 32), (4, 16)]
    assert plan.left_out == ["left out 1 of the matrix: a global batch of 64 cannot be divided among 3 workers evenly"]


def test_all_errors_of_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text('mode = "weka"\nrepeats = 0\n[matrix]\nmodel = ["lenet"]\nworkers = [0]\nstratgy = ["ring"]\n')
    with pytest.raises(ConfigError) as caught:
        load_study(path, {})
    text = str(caught.value)
    for part in ("weak, strong, scale-up", "repeats", "workers", "did you mean 'strategy'"):
        assert part in text


def test_contradictions_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text('mode = "strong"\n[matrix]\nnodes = [1]\nworkers = [1]\nbatch-size = [8]\ndata = ["x"]\n')
    with pytest.raises(ConfigError) as caught:
        load_study(path, {})
    assert len(caught.value.problems) == 4


def test_matrices_of_one_study_have_one_plan(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    matrix = '[[matrix]]\nmodel = ["lenet"]\ndata = ["synthetic:mnist"]\n'
    path.write_text(f"repeats = 1\n{matrix}workers = [1]\n{matrix}workers = [2]\nrepeats = 7\n")
    with pytest.raises(ConfigError, match="repeats differs between matrices"):
        load_study(path, {})
    assert load_study(path, {"repeats": 2}).plan.repeats == 2
    path.write_text(f"repeats = 1\n{matrix}workers = [1]\n{matrix}workers = [2]\nrepeats = 1\n")
    assert len(load_study(path, {}).matrices) == 2


def test_wrong_settings_of_runs_are_found_before_any_runs(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(
        '[matrix]\nmodel = ["lenet"]\ndata = ["synthetic:mnist", "no-such-folder"]\nworkers = [1, 2]\n'
        'strategy = ["ring", "ps"]\n[train]\nlearning-rate = -1\nranks = 3\nstep = 4\n'
    )
    study = load_study(path, {})
    with pytest.raises(ConfigError) as caught:
        prepare_points(study, make_plan(study))
    text = str(caught.value)
    assert "learning-rate" in text and "list nodes or workers" in text and "'steps'" in text
    assert len(caught.value.problems) == 3, "each once, though every point has it"
    path.write_text(path.read_text().partition("[train]")[0])
    study = load_study(path, {})
    with pytest.raises(ConfigError) as caught:
        prepare_points(study, make_plan(study))
    assert len(caught.value.problems) == 1 and "no such data folder" in str(caught.value)


def test_points_that_train_refuses_are_left_out_and_reported() -> None:
    study, plan = small_study(strategy="sync-easgd", workers="1,2,4")
    checked, run_plan = prepare_points(study, plan)
    assert (
        [point.workers for point in checked.points]
        == [2, 4]
        == [run_plan[p.number].num_workers for p in checked.points]
    )
    assert len(checked.runs) == 4
    assert any("averages over workers" in line for line in checked.left_out)


def test_a_matrix_of_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="'single' is one process"):
        small_study(strategy="single", workers="2,3")


def test_the_small_version_replaces_the_matrix(tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    path.write_text(
        'repeats = 5\n[matrix]\nmodel = ["resnet50"]\ndata = ["synthetic:imagenet"]\nnodes = [512]\n'
        "[train]\nsteps = 100\nmomentum = 0.8\n"
        '[small]\nrepeats = 2\n[small.matrix]\nmodel = ["lenet"]\ndata = ["synthetic:mnist"]\nworkers = [1]\n'
        "[small.train]\nsteps = 3\n"
    )
    big, small = load_study(path, {}), load_study(path, {}, ["seed=7"], small=True)
    assert (big.name, big.plan.repeats, big.matrices[0].shape.nodes, big.train["steps"]) == ("big", 5, (512,), 100)
    assert (small.name, small.plan.repeats) == ("big-small", 2)
    assert (small.matrices[0].shape.nodes, small.matrices[0].shape.workers) == ((), (1,))
    assert small.train == {"steps": 3, "momentum": 0.8, "seed": 7}
    path.write_text(path.read_text().partition("[small]")[0])
    with pytest.raises(UsageError, match=r"no table \[small\]"):
        load_study(path, {}, small=True)


def test_several_matrices_are_one_study(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        'repeats = 1\n[[matrix]]\nmodel = ["lenet"]\ndata = ["synthetic:mnist"]\nworkers = [1, 2]\n'
        '[[matrix]]\nmodel = ["cifar10-quick"]\ndata = ["synthetic:cifar10"]\nworkers = [2]\nbatch-size = [8]\n'
    )
    plan = make_plan(load_study(path, {}))
    assert [(p.number, p.model, p.data, p.workers, p.batch_size) for p in plan.points] == [
        (1, "lenet", "synthetic:mnist", 1, 32),
        (2, "lenet", "synthetic:mnist", 2, 32),
        (3, "cifar10-quick", "synthetic:cifar10", 2, 8),
    ]
    path.write_text("matrix = 3\n")
    with pytest.raises(ConfigError, match=r"matrix must be a table; write \[matrix\], or \[\[matrix\]\]"):
        load_study(path, {})


def plan_of(text: str, tmp_path: Path) -> tuple[Study, StudyRuns]:
    path = tmp_path / "study.toml"
    path.write_text(f'[matrix]\nmodel = ["lenet"]\ndata = ["synthetic:mnist"]\n{text}')
    study = load_study(path, {})
    return study, make_plan(study)


AXES = sorted(item.key for item in all_settings(TrainConfig) if item.key not in OWN)


@pytest.mark.parametrize("key", AXES)
def test_every_setting_of_train_is_an_axis(key: str, tmp_path: Path) -> None:
    """Every setting of train is an axis, from file and command line, and runs receive the value as written."""
    item = next(item for item in all_settings(TrainConfig) if item.key == key)
    words = (*item.choices, "1", "2", "0", "0.5", "0.25", "off", "full", "none", "int8")
    if key == "seed":
        words = ("1", "4")  # the three repeats use the seeds between these
    able = [choice for choice in words if _parses(item, choice)]
    assert able
    choices = list({item.parse(choice): choice for choice in able}.values())[:2]
    values = ", ".join(f'"{choice}"' for choice in choices)
    study, plan = plan_of(f'workers = [2]\nstrategy = ["ps"]\n{key} = [{values}]\n', tmp_path)
    parsed = [item.parse(choice) for choice in choices]
    assert [dict(point.settings)[key] for point in plan.points] == parsed
    flags = {"model": "lenet", "data": "synthetic:mnist", "workers": "2", "strategy": "ps"}
    typed = load_study(None, flags, axes=[f"{key}={','.join(choices)}"])
    assert [point.settings for point in make_plan(typed).points] == [point.settings for point in plan.points]
    assert load_tables(study, tmp_path) == [point.settings for point in plan.points], "as a job's file gives it again"


def test_an_axis_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learning-rate: no values; list one or more, or leave it out"):
        plan_of('workers = [2]\nstrategy = ["ps"]\nlearning-rate = []\n', tmp_path)


def _parses(item: Setting, value: str) -> bool:
    try:
        item.parse(value)
    except ValueError:
        return False
    return True


def load_tables(study: Study, tmp_path: Path) -> list[tuple[tuple[str, Any], ...]]:
    write_toml(tmp_path / "again.toml", study_tables(study))
    return [point.settings for point in make_plan(load_study(tmp_path / "again.toml", {})).points]


def test_a_seed_that_a_repeat_has_already_is_refused(tmp_path: Path) -> None:
    """A seed that a repeat already uses is refused: one draw would count as two measurements."""
    text = 'workers = [1]\nstrategy = ["ring"]\nseed = [1, 3]\n'
    with pytest.raises(
        UsageError, match="3 repeats of seed 1 have seeds 1 to 3, so that 3 would run twice; list seeds 3"
    ):
        plan_of(text, tmp_path)
    assert len(plan_of(text.replace("3]", "4]"), tmp_path)[1].runs) == 6
    assert plan_of(f'{text}period = [1, 2]\nzip = ["seed", "period"]\n', tmp_path)[1].runs
    flags = {"model": "lenet", "data": "synthetic:mnist", "workers": "1", "repeats": "1"}
    assert len(make_plan(load_study(None, flags, axes=["seed=1,2"])).runs) == 2


def test_zipped_axes_advance_together(tmp_path: Path) -> None:
    text = (
        'workers = [1, 2, 4]\nservers = [1, 1, 2]\nstrategy = ["ps"]\nperiod = [1, 2]\nzip = ["workers", "servers"]\n'
    )
    _, plan = plan_of(text, tmp_path)
    shapes = [(point.workers, point.servers, dict(point.settings)["period"]) for point in plan.points]
    assert shapes == [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2)]


def test_servers_may_be_a_share_of_the_workers(tmp_path: Path) -> None:
    _, plan = plan_of('workers = [1, 8, 20]\nservers = ["workers / 8"]\nstrategy = ["ps", "ring"]\n', tmp_path)
    assert [(point.workers, point.servers) for point in plan.points] == [
        (1, 1),
        (8, 1),
        (20, 3),
        (1, 0),
        (8, 0),
        (20, 0),
    ]


def test_what_is_excluded_is_left_out(tmp_path: Path) -> None:
    exclude = 'exclude = [{strategy = "ring", workers = [1]}, {strategy = "ps", workers = 2}]'
    _, plan = plan_of(f'workers = [1, 2]\nstrategy = ["ps", "ring"]\n{exclude}\n', tmp_path)
    assert [(point.strategy, point.workers) for point in plan.points] == [("ps", 1), ("ring", 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('zip = ["workers", "servers"]\nservers = [1]\n', "workers has 2, servers has 1"),
        ('zip = ["workers", "sevrers"]\n', "did you mean 'servers'"),
        ('zip = "workers"\n', "axes that advance together"),
        ("exclude = [1]\n", "exclude must list tables"),
        ('period = [1, "x"]\n', "not a whole number"),
        ("learning_rte = [1]\n", "did you mean"),
        ("ranks = [1]\n", "list nodes or workers"),
    ],
)
def test_mistakes_of_axes_are_reported(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(f"workers = [1, 2]\n{text}", tmp_path)


def test_labels_are_read(tmp_path: Path) -> None:
    study, _ = plan_of('workers = [1]\n[labels]\nlearning_rate = "eta"\n[labels.strategy]\nps = "Server"\n', tmp_path)
    assert study.labels == {"learning-rate": "eta", "strategy=ps": "Server"}


STUDIES = ROOT / "share" / "hpcdl" / "studies"
FOLDERS = {"sc17-groups": "synthetic:227x227x3:10@50000", "bnl-accuracy": "synthetic:imagenet",
           "sc17-methods": "synthetic:mnist", "rarely": "synthetic:mnist"}  # fmt: skip
"""Studies whose data the user must make first, and the synthetic data used here instead."""


@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.toml")))
def test_the_gallery_is_ready_to_run(name: str) -> None:
    """`hpcdl train` accepts every run of every study; the small versions fit one node."""
    flags = {"data": FOLDERS[name]} if name in FOLDERS else {}
    study = load_study(STUDIES / f"{name}.toml", flags)
    plan, _ = prepare_points(study, make_plan(study))
    assert study.name == name and study.plan.repeats == 3 and len(plan.points) >= 3
    assert len({point.strategy for point in plan.points}) == len({s for m in study.matrices for s in m.shape.strategy})
    flags = {"data": "synthetic:mnist"} if name in ("bnl-accuracy", "sc17-methods", "rarely") else {}
    small = load_study(STUDIES / f"{name}.toml", flags, small=True)
    plan, run_plan = prepare_points(small, make_plan(small))
    assert {point.nodes for point in plan.points} == {1}
    assert max(point.ranks for point in plan.points) <= 4
    assert name in ("bnl-accuracy", "sc17-methods", "rarely") or max(item.num_steps for item in run_plan.values()) <= 20
    assert small.plan.mode == study.plan.mode


def test_a_study_of_which_only_tries_could_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with Python's own error, because the tries counted as runs that are accepted."""
    study = load_study(STUDIES / "rarely.toml", {"data": "synthetic:mnist"})
    plan = make_plan(study)
    able = points.prepare

    def prepare(resolved: ResolvedConfig[TrainConfig]) -> RunPlan:
        if resolved.config.objective.target_accuracy is not None:
            raise UsageError("no held-out samples")
        return able(resolved)

    monkeypatch.setattr(points, "prepare", prepare)
    with pytest.raises(ConfigError, match="no held-out samples"):
        prepare_points(study, plan)

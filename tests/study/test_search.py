"""A search proposes good trials, stops poor ones, treats failures as results, and loses or repeats no trial."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from hpcdl.cli.study.search import as_document
from hpcdl.config.search import SearchStudy
from hpcdl.core.errors import ConfigError, CorruptError, UsageError
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.compose.build import compose
from hpcdl.report.document import Figure, Listing, Table
from hpcdl.report.renderers.figures import svg
from hpcdl.report.runs.searches import SearchRecord, SearchTrial, read_search
from hpcdl.report.runs.sources import Gathered
from hpcdl.report.sections.search import winner_line
from hpcdl.study.proposals import FINISHED, JOURNAL, Proposals
from tests.conftest import ROOT, CommandLine
from tests.study.searches import SPACE, TRAIN, make_search, run

NUM = 18
"""Number of trials of the search that most tests use."""
THREE = (
    "[space]\nlearning-rate = {low = 1e-4, high = 1.0, log = true}\nbatch-size = {low = 4, high = 512, log = true}\n"
    "momentum = {low = 0.0, high = 0.99}\n"
)


def known(rate: float, batch: float, momentum: float) -> float:
    """Return a value with an optimum of 1 at learning rate 0.03, batch 32, momentum 0.3."""
    return 1 - (math.log10(rate) + 1.5) ** 2 / 9 - (math.log2(batch) - 5) ** 2 / 36 - (momentum - 0.3) ** 2


def trials_needed(folder: Path, seed: int, sampler: str) -> int:
    search = make_search(folder, space=THREE, sampler=sampler, search_seed=seed)
    proposals = Proposals(folder, search)
    for count in range(1, 400):
        trial = proposals.ask()
        value = known(*(trial.settings[key] for key in ("learning-rate", "batch-size", "momentum")))
        proposals.tell(trial.number, FINISHED, [value])
        if value >= 0.98:
            return count
    return 400


def trials_at_random(seed: int) -> int:
    chance = random.Random(seed)
    count = 1
    while known(10 ** chance.uniform(-4, 0), round(2 ** chance.uniform(2, 9)), chance.uniform(0, 0.99)) < 0.98:
        count += 1
    return count


def compare(folder: Path, sampler: str, seeds: int) -> None:
    needed = [trials_needed(folder / str(seed), seed, sampler) for seed in range(seeds)]
    at_random = statistics.median(trials_at_random(seed) for seed in range(200))
    assert statistics.median(needed) <= at_random / 3, (sorted(needed), at_random)


@pytest.mark.parametrize("sampler", ["tpe", "cma-es"])
def test_it_needs_a_third_of_random_search(sampler: str, tmp_path: Path) -> None:
    compare(tmp_path, sampler, 3)


@pytest.mark.soak
@pytest.mark.parametrize("sampler", ["tpe", "cma-es"])
def test_it_needs_a_third_of_random_search_over_twenty_seeds(sampler: str, tmp_path: Path) -> None:
    compare(tmp_path, sampler, 20)


@pytest.mark.parametrize("sampler", ["tpe", "cma-es", "random"])
def test_a_resumed_search_proposes_nothing_again(sampler: str, tmp_path: Path) -> None:
    search = make_search(tmp_path, space=THREE, sampler=sampler)
    asked = [Proposals(tmp_path, search).ask().settings["learning-rate"] for _ in range(4)]
    assert len(set(asked)) == 4, "each by a process that was killed after it"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchStudy, SearchRecord]:
    """A search of NUM trials, with as many at a time as there are cores."""
    folder = tmp_path_factory.mktemp("search")
    search = make_search(folder, trials=NUM)
    return folder, search, run(folder, search, pace_s=0.03)


def starts(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def test_every_trial_has_one_end(found: tuple[Path, SearchStudy, SearchRecord]) -> None:
    folder, _, record = found
    assert [trial.number for trial in record.trials] == list(range(NUM)) and len(starts(folder)) == NUM
    states = Counter(trial.state for trial in record.trials)
    assert set(states) <= {"finished", "stopped", "failed"} and states["finished"]
    for trial in record.trials:
        assert (trial.state == "failed") == (trial.settings["learning-rate"] > 0.5)
        assert "not finite" in trial.message if trial.state == "failed" else trial.node_hours
        run_record = folder / "out" / "trials" / f"{trial.number:04d}" / "record.json"
        if trial.state == "stopped" and run_record.exists():
            assert json.loads(run_record.read_text())["status"] == "stopped", "it was ended on purpose"
    assert read_search(folder / "out" / "search.json") == record
    chance, flattered = record.doubts
    assert f"each of {states['finished'] + states['stopped']} trials ran once, so the best is partly chance" in chance
    assert "repeat its command with --seed 1, then 2" in chance and "held-out samples that chose the best" in flattered
    assert not dataclasses.replace(record, trials=[trial for trial in record.trials if trial.values][:1]).doubts
    again = dataclasses.replace(record, commands=["hpcdl train --seed 1 --model lenet"])
    assert "--seed 2, then 3" in again.doubts[0], "the same seed would be the same run"
    seeded = [dataclasses.replace(record.trials[0], settings={"seed": 3}), *record.trials[1:]]
    assert "which seed is best is chance" in dataclasses.replace(record, trials=seeded).doubts[1]
    timed = dataclasses.replace(record, objectives=["seconds"])
    assert len(record.places) == 1 and len(timed.doubts) == 1
    elsewhere = dataclasses.replace(timed, places=["EPYC, hpcdl 1", "Xeon, hpcdl 1"]).doubts[0]
    assert elsewhere.endswith("on different machines or versions compete: EPYC, hpcdl 1; Xeon, hpcdl 1")


@pytest.mark.parametrize(
    ("key", "objective", "doubted"),
    [("data", "seconds", True), ("loss", "loss", True), ("loss", "accuracy", False), ("optimizer", "loss", False)],
)
def test_values_that_measure_different_things_are_not_compared_in_silence(
    key: str, objective: str, doubted: bool
) -> None:
    trials = [
        SearchTrial(number=number, state="finished", settings={key: f"x{number}"}, values=[0.5]) for number in (0, 1)
    ]
    record = SearchRecord(
        name="s", origin="s.toml", sampler="tpe", objectives=[objective], directions=["minimize"], planned=2, mark="m",
        trials=trials,
    )  # fmt: skip
    assert any(f"{key} was searched too" in line for line in record.doubts) == doubted


@pytest.mark.parametrize(
    ("key", "objective", "length", "doubted"),
    [("batch-size", "accuracy", "--steps 20", True), ("ranks", "loss", "--steps 20", True),
     ("batch-size", "accuracy", "--epochs 2", False), ("batch-size", "images-per-second", "--steps 20", False),
     ("learning-rate", "accuracy", "--steps 20", False)],
)  # fmt: skip
def test_trials_that_trained_on_more_samples_are_not_called_better_in_silence(
    key: str, objective: str, length: str, doubted: bool
) -> None:
    trials = [
        SearchTrial(number=number, state="finished", settings={key: 8 + number}, values=[0.5]) for number in (0, 1)
    ]
    record = SearchRecord(
        name="s", origin="s.toml", sampler="tpe", objectives=[objective], directions=["minimize"], planned=2, mark="m",
        trials=trials, commands=[f"hpcdl train --model lenet {length} --ranks 1"],
    )  # fmt: skip
    assert any(f"{key} was searched with a fixed number of steps" in line for line in record.doubts) == doubted


@pytest.mark.parametrize(("again", "told"), [((32, 2000.0), True), ((32, 2587.0), False), ((16, 2000.0), False)])
def test_the_luckiest_of_several_trials_of_one_setting_is_called_so(again: tuple[int, float], told: bool) -> None:
    """The best setting was the one that a small space had tried twice: its other trial was the slowest of all."""
    measured = [(32, 2587.0), (16, 2402.0), again]
    trials = [
        SearchTrial(number=number, state="finished", settings={"batch-size": size}, values=[rate])
        for number, (size, rate) in enumerate(measured)
    ]
    record = SearchRecord(
        name="s", origin="s.toml", sampler="tpe", objectives=["images-per-second"], directions=["maximize"], planned=3,
        mark="m", trials=trials, front=(0,), commands=["hpcdl train --batch-size 32"],
    )  # fmt: skip
    line = "2 trials had the settings of the best, with images-per-second from 2000 to 2587, in the mean 2294"
    assert any(line in doubt for doubt in record.doubts) == told


def test_trials_side_by_side_have_cores_of_their_own(found: tuple[Path, SearchStudy, SearchRecord]) -> None:
    shares = {tuple(item["cpus"]) for item in starts(found[0])}  # type: ignore[arg-type]
    cores = len(os.sched_getaffinity(0))
    assert len(shares) == cores or cores == 1
    assert sum(map(len, shares)) == len({cpu for share in shares for cpu in share}), "no processor twice"


def test_the_best_is_the_best_and_its_command_is_whole(found: tuple[Path, SearchStudy, SearchRecord]) -> None:
    _, _, record = found
    document = as_document(record)
    finished = [trial for trial in record.trials if trial.state == "finished"]
    assert document["trials"] == NUM
    assert document["best"]["objective"] == max(trial.values[0] for trial in finished)
    command = document["best"]["command"]
    assert command.startswith("hpcdl train --model lenet --data digits --ranks 1 --learning-rate ")
    assert str(document["best"]["values"]["batch-size"]) == command.split()[-1]
    assert set(document["importance"]) <= {"learning-rate", "batch-size"}


def test_the_report_has_a_section(found: tuple[Path, SearchStudy, SearchRecord]) -> None:
    trials = [
        SearchTrial(number=number, state="finished", settings={"learning-rate": rate, "optimizer": "sgd", "x": [0]},
                    values=[accuracy], ended_after_s=10.0 * (number + 1), seconds=9.0, node_hours=0.1)
        for number, (rate, accuracy) in enumerate([(0.3, 0.5), (0.1, 0.9), (0.2, 0.8), (0.05, 0.95)])
    ]  # fmt: skip
    command = "hpcdl train --learning-rate 0.05"
    search = dataclasses.replace(
        found[2], trials=trials, front=(3,), commands=(command,), importance={"optimizer": 1.0}
    )
    assert [trial.number for trial, _ in search.best_so_far()] == [0, 1, 3]
    document = compose(analyse(Gathered(runs=()), searches=[search]))
    (section,) = [item for item in document.sections if item.name == "search"]
    assert [list(item.lines) for item in section.items if isinstance(item, Listing)] == [[command]]
    figures = {item.name: item for item in section.items if isinstance(item, Figure)}
    assert set(figures) == {"search-time", "search-node-hours", "search-parallel"}
    assert list(figures["search-node-hours"].series[0].x) == pytest.approx([0.1, 0.2, 0.4])
    assert all("<svg" in svg(figure) for figure in figures.values())
    assert document.summary[0].startswith("Search: 4 trials by tpe: at best accuracy 0.950 with learning-rate 0.0500")
    assert document.data["search"][0]["front"] == (3,)
    chance = "each of 4 trials ran once, so the best is partly chance"
    warnings = as_document(search)["warnings"]
    assert chance in warnings[0] and any(chance in line for line in document.data["warnings"])
    doubt = "the best 1 of 4 trials with all of them: with fewer than 5 of the best they may be chance"
    (mattered,) = [item for item in section.items if isinstance(item, Table) and item.title == "What mattered"]
    assert doubt in mattered.note and doubt in warnings[-1]
    many = [dataclasses.replace(trials[0], number=number) for number in range(41)]
    later = as_document(dataclasses.replace(search, trials=many, front=(3,)))["warnings"]
    assert not any("importances" in line for line in later)


def test_what_is_measured_on_the_samples_trained_on_is_called_so(tmp_path: Path) -> None:
    record = run(tmp_path / "train-only", make_search(tmp_path / "train-only", trials=4))
    assert record.front and record.on_training
    assert "(of the samples trained on)" in winner_line(record)
    assert not run(tmp_path / "a", make_search(tmp_path / "a", trials=4)).on_training


def test_it_continues_only_with_resume_and_the_same_search(found: tuple[Path, SearchStudy, SearchRecord]) -> None:
    folder, search, record = found
    with pytest.raises(UsageError, match="--resume"):
        run(folder, search)
    again = run(folder, search, resume=True)
    assert again.trials == record.trials and len(starts(folder)) == NUM, "nothing was left to do"
    other = make_search(folder, objective="loss", trials=NUM)
    with pytest.raises(UsageError, match="another name or objective"):
        run(folder, other, resume=True)


@pytest.mark.parametrize(
    ("train", "flags", "reported"),
    [
        ('[train]\nmodel = "lenet"\ndata = "letters"\n', {}, "data digits, now letters"),
        ('[train]\nmodel = "lenet"\ndata = "digits"\nepochs = 3\n', {}, "epochs unset, now 3"),
        (TRAIN, {"ranks": 2}, "ranks 1, now 2"),
    ],
)
def test_trials_of_another_job_do_not_compete(
    found: tuple[Path, SearchStudy, SearchRecord], train: str, flags: dict[str, int], reported: str
) -> None:
    """Resuming with other training settings is refused: the best command would contain settings that were not tried."""
    folder, _, _ = found
    with pytest.raises(UsageError, match=reported):
        run(folder, make_search(folder, train=train, trials=NUM + 1, **flags), resume=True)
    assert len(starts(folder)) == NUM


def test_a_journal_whose_result_is_no_number_is_damaged(tmp_path: Path) -> None:
    search = make_search(tmp_path, space=THREE)
    proposals = Proposals(tmp_path, search)
    for value in (0.25, 0.5):
        proposals.tell(proposals.ask().number, FINISHED, [value])
    journal = tmp_path / JOURNAL
    journal.write_text(journal.read_text().replace('"values":[0.5]', '"values":["0.5"]'))
    with pytest.raises(CorruptError, match=r"is damaged: .*a result of trial 1 is no number"):
        Proposals(tmp_path, search)


def test_killed_three_times_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    search = make_search(tmp_path, "trials = 10\nhalving = false")
    journal = tmp_path / "out" / "journal.log"
    for _ in range(3):
        before = len(starts(tmp_path)) if (tmp_path / "trials.jsonl").exists() else 0
        process = subprocess.Popen([sys.executable, "-m", "tests.study.searches", str(tmp_path)], cwd=ROOT)
        while not (tmp_path / "trials.jsonl").exists() or len(starts(tmp_path)) < before + 2:
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert journal.exists()
    record = run(tmp_path, search, resume=True)
    assert [trial.number for trial in record.trials] == list(range(10))
    assert {trial.state for trial in record.trials} <= {"finished", "failed"}
    runs = Counter(item["run"] for item in starts(tmp_path))
    assert set(runs) == {f"{number:04d}" for number in range(10)} and sum(runs.values()) <= 10 + 3 * 8


def test_several_objectives_have_a_front(tmp_path: Path) -> None:
    search = make_search(tmp_path, trials=8, objective="accuracy,seconds")
    record = run(tmp_path, search)
    values = {trial.number: trial.values for trial in record.trials if trial.values}
    assert set(record.front) <= set(values) and record.front
    for number in record.front:
        accuracy, seconds = values[number]
        assert not any(other[0] > accuracy and other[1] < seconds for other in values.values())
    assert set(as_document(record)["best"]["objective"]) == {"accuracy", "seconds"}


def test_conditions_hold(tmp_path: Path) -> None:
    space = (
        f'{SPACE}optimizer = ["sgd", "momentum"]\n'
        'momentum = {low = 0.5, high = 0.9, when = {optimizer = ["momentum"]}}\n'
    )
    proposals = Proposals(tmp_path, make_search(tmp_path, space=space))
    for _ in range(15):
        settings = proposals.ask().settings
        assert ("momentum" in settings) == (settings["optimizer"] == "momentum")


def test_a_grid_is_tried_once_whole(tmp_path: Path) -> None:
    space = "[space]\nlearning-rate = [0.01, 0.1]\nbatch-size = {low = 16, high = 48, step = 16}\n"
    record = run(tmp_path, make_search(tmp_path, space=space, sampler="grid", trials=50, halving="false"))
    tried = [(trial.settings["learning-rate"], trial.settings["batch-size"]) for trial in record.trials]
    assert sorted(tried) == [(rate, batch) for rate in (0.01, 0.1) for batch in (16, 32, 48)]


@pytest.mark.parametrize(
    ("text", "space", "words"),
    [
        ("trials = 0", SPACE, "at least 1"),
        ('objective = ["acuracy"]', SPACE, "is not one of accuracy"),
        ('objective = ["seconds-to-target"]', SPACE, "needs target-accuracy"),
        ("", "", "space.*must name settings"),
        ("", "[space]\nlearning-rte = [1]\n", "did you mean 'learning-rate'"),
        ("", "[space]\nlearning-rate = {low = 1, high = 0.1}\n", "is not a range"),
        (
            "",
            '[space]\nbucket-size = {low = "auto", high = "4MiB"}\n',
            "auto is not an end of a range; list the values",
        ),
        ("", "[space]\nstrategy = {low = 1, high = 2}\n", "list its values"),
        ("", "[space]\nranks = [1, 2]\n", "the search gives it"),
        ('sampler = "grid"', SPACE, "needs a list of values"),
    ],
)
def test_mistakes_are_reported(text: str, space: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make_search(tmp_path, text, space)


def test_too_many_side_by_side_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lower it"):
        run(tmp_path, make_search(tmp_path, parallel=len(os.sched_getaffinity(0)) + 1, ranks=1))


def test_a_trial_larger_than_all_nodes_is_refused_with_what_to_lower(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a trial needs \d+ nodes, and there is .*; lower --ranks"):
        run(tmp_path, make_search(tmp_path, ranks=100 * len(os.sched_getaffinity(0))))


def test_a_dry_run_shows_a_trial_and_writes_nothing(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "search.toml").write_text(
        'trials = 7\n[train]\nmodel = "lenet"\ndata = "synthetic:mnist@400"\nepochs = 2\n[space]\n'
        'momentum = {low = 0.5, high = 0.9, when = {optimizer = ["momentum"]}}\noptimizer = ["momentum", "sgd"]\n'
    )
    told = ask_hpcdl(["search", "search.toml", "--dry-run"], cwd=tmp_path)
    assert "search: 7 trials by tpe for accuracy" in told.out and "0.5 to 0.9 (with optimizer momentum)" in told.out
    command = told.out.splitlines()[-1]
    assert command.endswith("--optimizer momentum --momentum 0.5"), command
    assert ask_hpcdl(["search", "search.toml", "--dry-run", "--json"], cwd=tmp_path).json()["trials"] == 7
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["search.toml"]


def test_data_that_are_not_there_are_reported_before_any_trial(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    make_search(tmp_path)
    finished = ask_hpcdl(["search", tmp_path / "search.toml", "--out", tmp_path / "out"], cwd=tmp_path)
    assert finished.code == 2 and "no such data folder: digits" in finished.err, finished.err
    assert not (tmp_path / "out").exists()

"""Profiles and trial logs as the report shows them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.node.profile import Profile, Settings, TrialSummary, chosen, write_profile
from hpcdl.report.document import Column
from hpcdl.report.runs.sources import walk
from hpcdl.report.sections.tuning import winner_line
from hpcdl.tuning.findings import find_tunings, read_tuning
from hpcdl.tuning.log import TrialLog
from hpcdl.tuning.trials import TrialOutcome
from tests.conftest import CommandLine
from tests.report.synthetic import make_record, write_run

HEADER = {"fingerprint": "f00d", "engine": "a wheel", "workload": {"model": "lenet", "batch_size": 64}}
PICTURE = ("package 0", "  node 0  DRAM 24 GB  4 cores, CPUs 0-3", "    [0 0 1 1]", "one cell a core")


def settings(ranks: int, threads: int, binding: str = "balanced") -> Settings:
    return Settings(ranks_per_node=ranks, intra_op_threads=threads, inter_op_threads=2, binding=binding)


def make_log(path: Path, counted: str = "images") -> Path:
    log = TrialLog(path, HEADER, resume=False)
    for ranks, threads, binding, speeds in (
        (1, 1, "none", (100.0, 102.0)), (1, 4, "none", (300.0, 310.0)), (2, 2, "balanced", (400.0, 404.0, 396.0)),
        (1, 2, "balanced", (210.0,)),
    ):  # fmt: skip
        for speed in speeds:
            outcome = TrialOutcome(status="ok", images_per_second=speed, counted=counted)
            log.add(chosen(settings(ranks, threads, binding)), outcome)
    log.add(chosen(settings(4, 1)), TrialOutcome(status="failed", message="killed by signal 9, perhaps out of memory"))
    return path


def make_profile(path: Path, **changes: object) -> Path:
    def trial(own: Settings, speed: float | None, **more: object) -> TrialSummary:
        status = "ok" if speed else "failed"
        ci95 = speed / 100 if speed else None
        summary = TrialSummary(settings=chosen(own), status=status, n=3, images_per_second=speed, ci95=ci95)
        return dataclasses.replace(summary, **more)  # type: ignore[arg-type]  # the fields of a test

    profile = Profile(
        settings=settings(2, 2), machine="secret-host", processor="EPYC", fingerprint="f00d", num_cores=4,
        model="lenet", batch_size=64, images_per_second=400.0, ci95=4.0, n=3, picture=PICTURE,
        verdict="settled; best with probability 0.97, expected loss against the true best 0.1 %",
        trials=(
            trial(settings(2, 2), 400.0, memory_bytes_per_rank=1 << 30),
            trial(settings(1, 4, "none"), 320.0, origin="TensorFlow's defaults"),
            trial(settings(1, 1), 100.0),
            trial(settings(4, 1), None, message="exit code 1: <b>boom</b>"),
        ),
    )  # fmt: skip
    write_profile(dataclasses.replace(profile, **changes), path)  # type: ignore[arg-type]  # the fields of a test
    return path


def test_a_profile_keeps_what_the_report_needs(tmp_path: Path) -> None:
    tuned = read_tuning(make_profile(tmp_path / "p.toml"))
    assert (tuned.settings["ranks_per_node"], tuned.picture) == ("2", PICTURE)
    assert [point.threads for curve in tuned.curves for point in curve.points] == [1, 4]
    assert tuned.curves[0].points[1].settings["ranks_per_node"] == "2"  # the better of two with four threads
    assert tuned.attempts[1].origin == "TensorFlow's defaults"
    assert not tuned.effects, "three trials say nothing of three settings"


def test_a_log_alone_says_what_was_found_so_far_and_is_left_as_it_is(tmp_path: Path) -> None:
    path = make_log(tmp_path / "x.trials.jsonl", counted="samples")
    with path.open("ab") as file:
        file.write(b'{"settings": {"ranks_')  # the writer was killed here
    before = path.read_bytes()
    tuned = read_tuning(path)
    assert path.read_bytes() == before
    assert tuned.counted == "samples"
    assert (tuned.model, tuned.n, tuned.settings["intra_op_threads"]) == ("lenet", 3, "2")
    assert tuned.images_per_second == pytest.approx(400.0)
    assert tuned.verdict == "the best of 5 candidates in its log, which does not say if the search settled"
    assert [attempt.status for attempt in tuned.attempts].count("failed") == 1


def test_a_log_names_the_gpus_of_its_search(tmp_path: Path) -> None:
    path = make_log(tmp_path / "x.trials.jsonl")
    header, rest = path.read_text().split("\n", 1)
    for devices, known in (({"NVIDIA H200": 4}, {"NVIDIA H200": 4}), (None, {})):
        path.write_text(json.dumps(json.loads(header) | {"devices": devices}) + "\n" + rest)
        assert read_tuning(path).devices == known
    path.write_text(json.dumps(json.loads(header) | {"devices": {"NVIDIA H200": "many"}}) + "\n" + rest)
    with pytest.raises(CorruptError, match="header"):
        read_tuning(path)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    path.write_text('{"schema": "hpcdl.trials/1"}\nrubbish\n{}\n')
    with pytest.raises(CorruptError, match="line 2"):
        read_tuning(path)
    path.write_text('{"schema": "hpcdl.trials/9"}\n')
    with pytest.raises(UsageError, match=r"hpcdl\.trials/9"):
        read_tuning(path)
    path.write_text('{"schema": "hpcdl.trials/1"}\n')
    with pytest.raises(CorruptError, match="header"):
        read_tuning(path)
    path.write_text('{"schema": "hpcdl.trials/1", "fingerprint": "", "engine": "", "workload": {"model": "m", '
                    '"batch_size": 1e999}}\n')  # fmt: skip
    with pytest.raises(CorruptError, match="header"):
        read_tuning(path)
    path.write_text('{"schema": "hpcdl.trials/1"}\n{"settings": {}, "status": "ok"}\n')
    with pytest.raises(CorruptError, match="images_per_second is None"):
        read_tuning(path)


@pytest.mark.parametrize("num_samples", [-3, 0, 2**62])
def test_a_profile_that_counts_samples_oddly_is_shown(num_samples: int, tmp_path: Path) -> None:
    own, other = settings(2, 2), settings(1, 1)
    trials = [
        TrialSummary(settings=chosen(item), status="ok", n=count, images_per_second=speed)
        for item, count, speed in ((own, num_samples, 400.0), (other, 3, 100.0), (settings(1, 2), 3, 190.0),
                                   (settings(2, 1), 3, 210.0), (settings(4, 1), 3, 420.0), (settings(1, 4), 3, 380.0),
                                   (settings(4, 2), 3, 800.0))
    ]  # fmt: skip
    tuned = read_tuning(make_profile(tmp_path / "p.toml", trials=trials))
    assert all(0.1 < effect.ratio < 10 for effect in tuned.effects) and tuned.effects


def test_searches_are_found_below_a_folder_once_each(tmp_path: Path) -> None:
    make_profile(tmp_path / "a" / "p.toml")
    make_log(tmp_path / "a" / "p.trials.jsonl")
    make_log(tmp_path / "b" / "q.trials.jsonl")
    (tmp_path / "run.toml").write_text("[run]\nranks = 2\n")
    assert find_tunings(tmp_path, walk(tmp_path)) == [tmp_path / "a" / "p.toml", tmp_path / "b" / "q.trials.jsonl"]
    assert find_tunings(tmp_path / "run.toml", []) == []


def test_the_profiles_that_a_study_makes_for_its_runs_are_no_searches(tmp_path: Path) -> None:
    """Profiles that a weak-scaling study writes for its numbers of ranks are no searches: no trial made them."""
    make_profile(tmp_path / "study" / "profiles" / "2-ranks-1-threads.toml", trials=[])
    make_profile(tmp_path / "tuned" / "profiles" / "p.toml")
    (tmp_path / "study" / "study.json").write_text("{}")
    assert find_tunings(tmp_path, walk(tmp_path)) == [tmp_path / "tuned" / "profiles" / "p.toml"]


def test_a_profile_that_was_written_without_a_trial_says_so(tmp_path: Path) -> None:
    tuned = read_tuning(make_profile(tmp_path / "p.toml", trials=[], images_per_second=None, verdict=""))
    line = winner_line(tuned, Column.rate("images"))
    assert line.endswith(", written without a trial") and "no candidate" not in line


def test_the_report_shows_the_search(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = make_profile(tmp_path / "p.toml", devices={"NVIDIA H200": 4})
    finished = ask_hpcdl(["report", path, "--out", out, "--figures"])
    assert finished.code == 0, finished.err
    assert "Tuning report: lenet" in finished.out
    assert "[0 0 1 1]" in finished.out
    assert {path.name for path in (out / "figures").iterdir()} == {f"tuning-1.{form}" for form in ("svg", "png", "pdf")}
    page = (out / "report.html").read_text()
    assert re.search(r'<pre role="img" aria-label="The node with the winner[^"]+">\n(.*\n)*    \[0 0 1 1\]', page)
    assert "<svg" in page
    assert "1.25 times as fast as TensorFlow&#x27;s defaults [1.24, 1.26]." in page
    assert "probability 0.97" in page and "measured on: EPYC, 4 x NVIDIA H200, secret-host" in page
    assert "<b>boom" not in page
    [tuning] = json.loads((out / "report.json").read_text())["tuning"]
    assert [point["threads"] for point in tuning["curves"][0]["points"]] == [1, 4]
    assert "        [0 0 1 1]" in (out / "report.md").read_text().splitlines()


def test_runs_and_searches_of_one_folder_are_reported_together(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    write_run(tmp_path / "study" / "run", make_record())
    make_profile(tmp_path / "study" / "p.toml")
    finished = ask_hpcdl(["report", tmp_path / "study", "--out", tmp_path / "out", "--format", "json", "--json"])
    assert finished.code == 0, finished.err
    document = finished.json()
    assert (len(document["runs"]), len(document["tuning"])) == (1, 1)
    assert document["summary"][-1].startswith("Tuning: lenet: ranks_per_node=2")


def test_an_anonymous_report_names_no_host(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    path = make_profile(tmp_path / "ada-profile.toml", model="/home/ada/net.py:build")
    finished = ask_hpcdl(["report", path, "--out", tmp_path / "out", "--anonymous"])
    assert finished.code == 0, finished.err
    for file in (tmp_path / "out").glob("report.*"):
        assert not re.search("secret-host|/home/ada|ada-profile|boom", file.read_text()), file


@pytest.mark.parametrize(
    ("speed", "changes", "says"),
    [
        (395.0, {"ci95": 16.0}, "1.01 times as fast as TensorFlow's defaults [0.98, 1.05], not distinguishable."),
        (320.0, {"n": 1, "ci95": None}, "1.25 times as fast as TensorFlow's defaults (too few samples"),
        (320.0, {"ci95": 1e300}, "1.25 times as fast as TensorFlow's defaults (too few samples"),
        (400.0, {"settings": chosen(settings(2, 2))}, "The winner is TensorFlow's defaults."),
    ],
)
def test_the_winner_is_beside_the_defaults_with_an_interval(
    speed: float, changes: dict[str, Any], says: str, ask_hpcdl: CommandLine, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"settings": chosen(settings(1, 4, "none")), "n": 3, "ci95": speed / 100} | changes
    defaults = TrialSummary(status="ok", images_per_second=speed, origin="TensorFlow's defaults", **values)
    best = TrialSummary(settings=chosen(settings(2, 2)), status="ok", n=3, images_per_second=400.0, ci95=4.0)
    path = make_profile(tmp_path / "p.toml", trials=(best, defaults))
    finished = ask_hpcdl(["report", path, "--out", tmp_path / "out", "--format", "md"])
    assert finished.code == 0, finished.err
    assert says in re.sub(r"\\(.)", r"\1", (tmp_path / "out" / "report.md").read_text())

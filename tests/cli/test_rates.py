"""Commands give speeds in the unit that the run counts: images, or samples of anything else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpcdl.bench.step import StepResult
from hpcdl.cli import node
from hpcdl.cli.app import app_for
from hpcdl.cli.options import resolved
from hpcdl.cli.output import Commentary
from hpcdl.cli.training import infer, train, watch
from hpcdl.config.schema import TuneConfig
from hpcdl.core.records.run_record import HistoryPoint, InferenceRecord
from hpcdl.node.profile import Profile, Settings, TrialSummary
from hpcdl.supervision.live import RunNow
from hpcdl.tuning.findings import SearchResult
from hpcdl.tuning.search import Choice
from hpcdl.tuning.tune import SearchProgress, Tuned
from tests.report.synthetic import make_record, write_run

UNITS = ("images", "samples")
OTHER = {"images": "samples/s", "samples": "images/s"}


class Bar:
    """A progress bar that keeps its text."""

    def __init__(self) -> None:
        self.said = ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, done: float, reported: str) -> None:
        self.said = reported


@pytest.mark.parametrize("counted", UNITS)
def test_the_end_of_a_training_and_its_bar(
    counted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = Bar()
    monkeypatch.setattr(train, "progress", lambda title, total, *, enabled: bar)
    with train.Follower() as follower:
        follower.show({"kind": "start", "steps": 9, "done": 0, "counted": counted})
        follower.show({"kind": "step", "step": 1, "loss": 0.5, "images_per_second": 1234.5})
    assert bar.said == f"step 1  1,230 {counted}/s  loss 0.5000"
    train.print_summary(Path("run"), make_record(2, 1234.5, counted=counted))
    assert f"; 1,230 {counted}/s\n" in capsys.readouterr().out


def test_the_end_of_a_training_shows_small_losses_and_what_they_were_measured_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = dataclasses.replace(make_record(2, 1.0), loss=0.00027)
    point = HistoryPoint(epoch=1.0, step=1, seconds=1.0, loss=0.5)
    held_out = dataclasses.replace(point, val_loss=0.00027, val_metrics={"r2": 0.5})
    for last, reported in ((point, "loss 0.00027"), (held_out, "held-out loss 0.00027, r2 0.5000")):
        train.print_summary(Path("run"), dataclasses.replace(trained, history=[last], accuracy=None))
        assert f"; 1 images/s, {reported}\n" in capsys.readouterr().out


def test_a_warning_that_was_shown_when_it_came_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    with train.Follower() as follower:
        follower.show({"kind": "message", "text": "warning: no room"})
    record = dataclasses.replace(make_record(2, 1.0), warnings=["no room", "few steps"])
    train.print_summary(Path("run"), record, printed=follower.printed)
    reported = capsys.readouterr().err
    assert reported.count("warning: no room") == reported.count("warning: few steps") == 1


@pytest.mark.parametrize(("epoch", "shown"), [(0.3204, "0.32"), (12.0, "12"), (1234.0, "1234")])
def test_a_line_of_an_epoch_tells_the_time_since_the_start(
    epoch: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with train.Follower() as follower:
        follower.show({
            "kind": "epoch", "epoch": epoch, "step": 40, "seconds": 0.505, "loss": 2.25, "accuracy": None,
            "val_loss": None, "val_accuracy": None,
        })  # fmt: skip
    assert f"epoch {shown}  step 40  after 505 ms  loss 2.2500" in capsys.readouterr().err


def test_an_inference_says_what_this_call_took(capsys: pytest.CaptureFixture[str]) -> None:
    found = InferenceRecord(
        num_computed=40, num_kept=100, num_shards=5, batch_seconds_median=0.1, batch_seconds_p99=1.0
    )
    record = dataclasses.replace(make_record(2, 20.0, counted="samples"), seconds_total=2.0, inference=found)
    infer._print_summary(Path("out"), record, (), advise=False)
    reported = (
        "140 samples in 5 shards; 40 of them computed in 2 s on 2 ranks, 20 samples/s; a batch of 32 in 100 ms (median;"
    )
    assert reported in capsys.readouterr().out


@pytest.mark.parametrize("counted", UNITS)
def test_a_run_that_is_watched(counted: str) -> None:
    now = RunNow(
        status="running", step=3, num_steps=9, loss=None, images_per_second=64.0, counted=counted, seconds_left=None,
        ranks=(), num_ranks=0,
    )  # fmt: skip
    assert list(watch.lines(now)) == [f"running  step 3 of 9  64 {counted}/s"]


@pytest.mark.parametrize("counted", UNITS)
def test_a_benchmark_of_steps(counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = StepResult(
        model="lenet", strategy="ring", ranks=2, workers=2, nodes=1, batch_size=8, step_seconds=0.1,
        compute_seconds=None, exposed_communication_seconds=None, efficiency=None, steps=1, images_per_second=160.0,
        step_middle_half=(0.1, 0.1), compute_middle_half=(), distinguishable=None, bucket_bytes=None,
        counted=counted, samples=[160.0], loss=2.3, bytes_sent_per_step=None, peak_memory_bytes=1, warnings=[],
    )  # fmt: skip
    monkeypatch.setattr("hpcdl.bench.step.run", lambda config, begins: result)
    shown = CliRunner().invoke(app_for(), ["bench", "step", "--model", "lenet", "--batch-size", "8"])
    assert f"throughput             160 {counted}/s\n" in shown.output and OTHER[counted] not in shown.output


@pytest.mark.parametrize("counted", UNITS)
def test_a_search_for_threads(counted: str, capsys: pytest.CaptureFixture[str]) -> None:
    best = Choice(index=0, images_per_second=99.0, ci95=1.0, n=3, expected_loss=0.0, probability_best=1.0)
    state = SearchProgress(seconds=1.0, num_samples=3, best=best, settings=Settings(), counted=counted)
    assert node._note(state).startswith(f"best 99 {counted}/s: ")
    trials = (TrialSummary(settings={}, status="ok", n=3, images_per_second=99.0),)
    profile = Profile(
        settings=Settings(), machine="", processor="", fingerprint="", num_cores=1, model="lenet", batch_size=8,
        images_per_second=99.0, counted=counted, trials=trials,
    )  # fmt: skip
    found = SearchResult(
        choice=best, settings=Settings(), trials=trials, counted=counted, num_samples=3, seconds=1.0, settled=True,
        stopped=False, warnings=(),
    )  # fmt: skip
    tuned = Tuned(profile=profile, result=found, path=Path("p.toml"), log=Path("l"))
    settings = resolved(TuneConfig, "tune-threads", {"model": "lenet", "batch_size": 8}, None, None).config
    node._show_result(tuned, settings, json=False, commentary=Commentary(quiet=False))
    shown = capsys.readouterr().out
    assert f"{counted}/s" in shown and OTHER[counted] not in shown


@pytest.mark.parametrize(
    ("kept", "unit"),
    [(("images", "images"), "images"), (("samples", "samples"), "samples"), (("images", "samples"), "samples"),
     ((None, "images"), "images"), (("\x1b[31mrows", "rows"), "samples")],
)  # fmt: skip
def test_the_runs_of_a_folder(kept: tuple[Any, Any], unit: str, tmp_path: Path) -> None:
    """Records of earlier versions without a unit counted images; a unit unknown to this version is shown as samples."""
    for number, counted in enumerate(kept):
        path = write_run(tmp_path / str(number), make_record(1, 90.0 + number, counted=counted or ""))
        if counted is None:
            record = path / "record.json"
            record.write_text(record.read_text().replace(' "counted": "",\n', ""))
            assert "counted" not in record.read_text()
    write_run(tmp_path / "begun", make_record(1, None, status="running", counted="samples"))
    shown = CliRunner().invoke(app_for(), ["runs", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert f"{unit}/s" in shown and OTHER[unit] not in shown and "\x1b" not in shown


def test_a_run_without_counted_steps_lists_none(tmp_path: Path) -> None:
    for name, steps in (("loop", 0), ("fit", 40)):
        write_run(tmp_path / "runs" / name, dataclasses.replace(make_record(2, 18014.2), steps=steps))
    listed = CliRunner().invoke(app_for(), ["runs", str(tmp_path / "runs")], env={"COLUMNS": "200"}).output
    assert "images/s 18014," in listed and "\nfit      40\nloop\n" in listed, listed

"""A report gives throughputs in images if all its runs count images, else in samples; JSON keys stay the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcdl.report.analysis.analyse import Analysis, analyse
from hpcdl.report.compose.build import compose, render
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.searches import ThreadCurve, ThreadPoint, TunedNode, TunedTrial
from hpcdl.report.runs.sources import Gathered
from hpcdl.report.sections.prediction import forecast_figure
from tests.report.synthetic import NOISE, as_run, make_record, make_run

UNITS = {"images": "samples", "samples": "images"}
SHOWN = ("baseline", "setup", "tuning", "learning", "scale-up", "strong", "weak", "strategies", "compared", "cost")
"""The sections that show a throughput."""


def study(counted: str, factor: float = 1.0) -> tuple[Run, ...]:
    """Return runs that fill every section with a throughput."""
    weak = [
        make_run(n, rate * n * noise * factor, strategy=strategy, counted=counted)
        for n in (1, 2) for strategy, rate in (("ring", 100), ("tree", 60)) for noise in NOISE
    ]  # fmt: skip
    strong = [make_run(n, 90.0 * n, mode="strong", batch_per_rank=64 // n, counted=counted) for n in (1, 2)]
    up = [make_run(1, 50.0 * n, mode="scale-up", threads=n, model="vgg19", counted=counted) for n in (1, 2)]
    machines = [make_run(1, 70.0, model="hepcnn", machine=name, counted=counted) for name in ("a", "b")]
    return (*weak, *strong, *up, *machines, make_run(4, 0.0, counted=counted))


def tuned(counted: str) -> TunedNode:
    points = [ThreadPoint(threads=n, images_per_second=50.0 * n, ci95=1.0, n=3, settings={}) for n in (1, 2)]
    attempt = TunedTrial(
        settings={}, status="ok", n=3, images_per_second=100.0, ci95=1.0, memory_bytes_per_rank=1, message="", origin=""
    )
    return TunedNode(
        name="p.toml", model="lenet", batch_size=8, images_per_second=100.0, counted=counted, attempts=[attempt],
        curves=[ThreadCurve(batch_size=None, points=points)],
    )  # fmt: skip


def analysis(counted: str) -> Analysis:
    return analyse(
        Gathered(runs=study(counted)), baseline=Gathered(runs=study(counted, 0.5)), baseline_name="before",
        tunings=[tuned(counted)], compare="machine",
    )  # fmt: skip


@pytest.mark.parametrize("counted", UNITS)
def test_every_section_states_throughput_in_what_is_counted(counted: str) -> None:
    found = compose(analysis(counted))
    assert {section.name for section in found.sections} >= set(SHOWN)
    for section in found.sections:
        assert (f"{counted}/s" in repr(section) or f"million {counted}" in repr(section)) == (section.name in SHOWN)
    everything = repr(dataclasses.replace(found, data={}, rows=()))
    assert f"{UNITS[counted]}/s" not in everything and f"million {UNITS[counted]}" not in everything
    assert [f"{counted}/s" in line for line in found.summary].count(True) == 2  # best run and tuning


@pytest.mark.parametrize("counted", UNITS)
def test_every_form_states_it_and_keys_stay(counted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compose(analyse(Gathered(runs=study(counted))))
    render(found, tmp_path, ["terminal", "html", "md", "csv", "json"])
    forms = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    for text in (capsys.readouterr().out, forms["report.html"], forms["report.md"], " ".join(found.summary)):
        assert f"{counted}/s" in text and f"{UNITS[counted]}/s" not in text
    assert "images_per_second_mean" in forms["scaling.csv"].splitlines()[0]
    assert '"images_per_second": {' in forms["report.json"]


def test_images_among_other_samples_are_samples() -> None:
    images, rows = make_run(1, 100.0), make_run(1, 90.0, data="rows", counted="samples")
    assert analyse(Gathered(runs=(images,))).counted == "images"
    assert analyse(Gathered(runs=(images, rows))).counted == "samples"
    assert analyse(Gathered(runs=(images,)), tunings=[tuned("samples")]).counted == "samples"
    begun = make_run(1, None, status="running", counted="samples")
    assert analyse(Gathered(runs=(images, begun))).counted == "images", "it has no throughput to tell"


def test_a_record_says_what_it_counts_and_one_of_an_earlier_version_images() -> None:
    assert as_run(make_record(1, counted="samples"), "r").counted == "samples"
    assert as_run(make_record(1), "r").counted == "images"
    odd = as_run(make_record(1, counted="<b>\x1b[31m"), "r")
    assert analyse(Gathered(runs=(odd,))).counted == "samples"


@pytest.mark.parametrize("counted", UNITS)
def test_predicted_throughput_too(counted: str) -> None:
    figure = forecast_figure("lenet-throughput", "throughput", [], counted)
    assert (figure.y_label, figure.table.columns[-1].name) == (f"{counted}/s", f"{counted}/s")
    assert forecast_figure("lenet-efficiency", "efficiency", [], counted).y_label == "efficiency"

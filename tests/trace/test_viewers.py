"""A trace for other viewers, and its page in a browser."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest

from hpcdl.core.errors import UsageError
from hpcdl.trace.findings import findings
from hpcdl.trace.page import page
from hpcdl.trace.steps import steps_of
from hpcdl.trace.viewers import LANES, VIEWERS
from tests.report.test_page import FLAGS
from tests.trace.made import NAMES, records, synchronous

INPUT_S, COMPUTE_S = numpy.full((3, 20), 0.01), numpy.linspace(0.1, 0.16, 60).reshape(3, 20)


@pytest.mark.parametrize("viewer", ["perfetto", "chrome"])
def test_chromes_json_is_as_documented(tmp_path: Path, viewer: str) -> None:
    """JSON conforms to the Trace Event Format: complete events with ts and dur in µs, counters, names as metadata."""
    sending = records("sending", numpy.array([0.5]), numpy.array([0.6]), numpy.array([3]), peer=1, value=1 << 33)
    layer = records("forward", numpy.array([0.3]), numpy.array([0.4]), numpy.array([3]), bucket=NAMES.index("dense"))
    merged, _ = synchronous(INPUT_S, COMPUTE_S, more={0: [sending, layer]}, rates=[{"memory": 1.0}] * 3)
    VIEWERS[viewer](merged, tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        document = json.load(file)
    found = document["traceEvents"]
    assert {event["ph"] for event in found} <= {"X", "C", "M"}
    for event in found:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and 0 <= event["tid"] < len(LANES)
    processes = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert processes == {rank: f"rank {rank} (worker on host{rank})" for rank in range(3)}
    computing = [event for event in found if event["name"] == "compute" and event["pid"] == 0]
    assert len(computing) == 20 and computing[0]["dur"] == pytest.approx(1e5, abs=1)
    (sent,) = (event for event in found if event["name"] == "sending")
    assert sent["args"] == {"step": 3, "peer": 1, "bytes": 1 << 33}
    assert [event["args"] for event in found if event["name"] == "forward dense"] == [{"step": 3}]
    clocks = json.loads(document["otherData"]["clocks"])
    assert [clock["host"] for clock in clocks] == ["host0", "host1", "host2"]


def test_otf2_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged, _ = synchronous(INPUT_S, COMPUTE_S)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'hpcdl\[otf2\]'"):
        VIEWERS["otf2"](merged, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_page_is_one_file_with_three_timelines() -> None:
    merged, steps = synchronous(INPUT_S, COMPUTE_S, hidden_s=0.02)
    drawn = page("<run> & more", merged, steps, findings(merged, steps))
    assert drawn.count("<figure") == 3 and drawn.count("rank 2</text>") == 3
    assert "A typical step" in drawn and "The fastest step: step 0" in drawn and "The slowest step: step 19" in drawn
    assert "&lt;run&gt; &amp; more" in drawn and "<run>" not in drawn
    assert "http" not in drawn.replace('http-equiv="Content', "") and "<script" not in drawn


def test_the_page_draws_layers_where_they_are_known() -> None:
    layer = records("backward", numpy.array([0.03]), numpy.array([0.04]), numpy.array([0]), bucket=NAMES.index("conv1"))
    merged, steps = synchronous(INPUT_S, COMPUTE_S, more={1: [layer]}, ahead_s=0.0)
    drawn = page("run", merged, steps, findings(merged, steps))
    assert drawn.count("<title>backward conv1, 10 ms</title>") == 1 and "<th>Layer</th>" in drawn


def test_steps_that_do_not_happen_together_are_drawn_from_their_own_begin() -> None:
    merged, _ = synchronous(INPUT_S, COMPUTE_S)
    alone = steps_of(merged, synchronous=False)
    drawn = page("run", merged, alone, findings(merged, alone))
    assert drawn.count("<figure") == 3 and drawn.count('x="90.00"') >= 9


@pytest.fixture(scope="module")
def browser() -> str:
    return str(shutil.which("chromium"))


@pytest.mark.lab
@pytest.mark.parametrize("flags", [(), ("--force-dark-mode",)], ids=["light", "dark"])
def test_a_browser_shows_the_page(browser: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    from PIL import Image

    merged, steps = synchronous(INPUT_S, COMPUTE_S, hidden_s=0.02)
    (tmp_path / "page.html").write_text(page("run", merged, steps, findings(merged, steps)))
    shot = tmp_path / "shot.png"
    command = [browser, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}"]
    size = ["--window-size=1000,900", "--virtual-time-budget=4000", f"--screenshot={shot}"]
    finished = subprocess.run(
        [*command, *size, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    assert ":CONSOLE" not in finished.stderr
    with Image.open(shot) as opened:
        colors = opened.convert("RGB").getcolors(2**24) or []
        corner = opened.convert("RGB").getpixel((2, 2))
    assert len(colors) > 50, "the page is blank"
    assert isinstance(corner, tuple) and (sum(corner[:3]) < 384) == bool(flags)

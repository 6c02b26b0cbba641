"""Local SGD, SlowMo and DiLoCo in scripts: two ranks equal plain numpy and `hpcdl train`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdl.strategies.periodic.methods import METHODS
from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, cases_of, keys_of, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPT = "periodic_cases.py"
CASES = [
    *(f"{name} as train does" for name in METHODS),
    "streaming-diloco in fp4 as train does",
    *(f"{name} by the paper" for name in keys_of(SCRIPT, "OUTER")),
    *cases_of(SCRIPT, r"^@case\ndef (\w+)"),
]


RARELY = """
import hpcdl; hpcdl.init()
import keras, numpy
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer("adam", strategy="diloco", period=4, outer_rate=0.5), "mean_squared_error")
images, targets = numpy.ones((96, 8), "float32"), numpy.ones((96, 1), "float32")
model.fit(images, targets, batch_size=8, epochs=1, verbose=0)
"""


@pytest.fixture(scope="module")
def said(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("periodic")
    ended = succeed(run_script(session_hpcdl, HERE / SCRIPT, folder, ranks=2, cwd=folder, timeout_s=900))
    assert "AutoGraph could not" not in ended.err, "what is called in a graph is left as it is"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_meet_rarely(said: list[dict[str, str]], case: str) -> None:
    assert [one[case] for one in said] == ["", ""]


def test_record_and_report_say_strategy_period_and_bytes(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "rarely.py").write_text(RARELY)
    run_dir = tmp_path / "run"
    ended = run_hpcdl(["run", "-n", 2, "--run-dir", run_dir, tmp_path / "rarely.py"])
    assert ended.code == 0, ended.err
    record = json.loads((run_dir / "record.json").read_text())
    assert (record["strategy"], record["config"]["period"], record["config"]["outer-rate"]) == ("diloco", 4, 0.5)
    weights = 4 * (8 * 64 + 64 + 64 + 1)
    assert 3 / 12 * weights <= record["bytes_sent_per_step"] <= 3 / 12 * 1.1 * weights, "three exchanges in 12 steps"
    report = run_hpcdl(["report", run_dir, "--out", tmp_path / "report", "--format", "md"])
    assert report.code == 0, report.err
    page = (tmp_path / "report" / "report.md").read_text()
    assert "diloco" in page and "| period | 4 |" in page

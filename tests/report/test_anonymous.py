"""An anonymous report contains no host, user or path, in any form."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcdl.core.records.run_record import RankRecord
from hpcdl.report.analysis.analyse import analyse
from hpcdl.report.analysis.settings import default_of
from hpcdl.report.compose.build import compose, render
from hpcdl.report.runs.anonymous import anonymised
from hpcdl.report.runs.run import machine_name
from hpcdl.report.runs.sources import Gathered
from tests.report.synthetic import as_run, make_record

SECRETS = ("alice", "secrethost", "/scratch", "projectx")


def test_nothing_that_names_people_or_places_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        make_record(
            n, 100.0 * n, hosts=("secrethost1", "secrethost2"), machine="secrethost-cluster",
            data="/scratch/alice/shards", model="/home/alice/projectx.py:build",
            warnings=("rank 0 on secrethost1 is slow",),
            rank_records=[
                RankRecord(rank=rank, host="secrethost1", parts={"compute": 0.1 + rank}) for rank in range(n)
            ],
            software={"hpcdl": "1", "python": "/home/alice/bin"}, status=status, message="cannot read /scratch/alice",
        )
        for n in (1, 2)
        for status in ("finished", "failed")
    ]  # fmt: skip
    runs = tuple(as_run(record, f"alice/run{number}") for number, record in enumerate(records))
    study = analyse(
        anonymised(Gathered(runs=runs, unreadable=("/scratch/alice/x",), remarks=("projectx.csv: doubled",)))
    )
    render(compose(study), tmp_path, ["terminal", "html", "md", "csv", "json"])
    texts = [path.read_text() for path in tmp_path.rglob("*.*")] + [capsys.readouterr().out]
    assert len(texts) > 5
    for secret in SECRETS:
        assert not [text for text in texts if secret in text], secret
    assert any("machine 1" in text for text in texts)
    assert any("one worker computes 1.5 times as long" in text for text in texts)


def test_settings_are_not_invented_and_a_data_set_keeps_its_name() -> None:
    """Default and empty settings stay as they are; a data set is hidden only on request."""
    records = [make_record(n, 100.0 * n, data="digits") for n in (1, 2)]
    config = {"metrics": "", "trace": default_of("trace"), "schedule": "constant", "inject": "kill:rank=1@host=secret"}
    runs = tuple(
        dataclasses.replace(as_run(record, f"run{number}"), config=config) for number, record in enumerate(records)
    )
    plain = anonymised(Gathered(runs=runs)).runs[0]
    assert plain.config == {**config, "inject": "(withheld) 1"}
    assert plain.data == "digits"
    assert anonymised(Gathered(runs=runs), hide_data=True).runs[0].data == "data 1"


def test_hosts_of_one_machine_are_one_machine() -> None:
    assert machine_name("node17.cluster2.org", ("node17.cluster2.org",)) == "node*.cluster2.org"
    assert machine_name("lab", ("node1", "node2")) == "lab"

"""The resilience card: what is counted, how it is shown, and one fault tried for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.errors import UnknownNameError
from hpcdl.doctor.certify import FAULTS, SAVING, Plan, Trial, rows_of, summary, write_card
from hpcdl.training.session.faults import parse_faults
from tests.conftest import CommandLine


def trial(**facts: Any) -> Trial:
    usual = {"fault": "worker killed", "strategy": "ring", "survived": True, "struck": True, "recover_s": 2.0}
    return Trial(**{**usual, "steps_lost": 1, "said": "", **facts})


def plan(**changes: Any) -> Plan:
    usual = {"strategies": ["ring", "ps"], "faults": [*FAULTS], "tries": 2, "num_ranks": 3, "out": Path("card")}
    return Plan(**{**usual, **changes})


def test_servers_are_killed_where_there_are_servers() -> None:
    cases = plan().cases()
    assert {strategy for strategy, fault, _ in cases if fault == "server killed"} == {"ps"}
    alone = [fault for fault, text in FAULTS.items() if "host=" not in text]
    assert len(cases) == 2 * (2 * len(alone) - 1)
    assert {fault for _, fault, _ in plan(num_nodes=2).cases()} == {*FAULTS}, "other nodes are there to be cut off"
    found = {fault for _, fault, _ in plan(num_nodes=2, strategies=["grpc-ring"]).cases()}
    assert found - {*alone} == {"node with another clock"}, "hpcdl does not see the messages of grpc-*"
    with pytest.raises(UnknownNameError, match="unknown fault 'flood'"):
        plan(faults=["flood"]).cases()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_can_be_injected(fault: str) -> None:
    assert parse_faults(FAULTS[fault].format(last=2), 3)


def test_how_a_run_saves_is_told_for_faults_that_there_are() -> None:
    assert set(SAVING) <= set(FAULTS)


def test_the_summary_counts_survivors_and_what_they_lost() -> None:
    trials = [trial(), trial(recover_s=4.0, steps_lost=3), trial(survived=False, recover_s=None, said="gone")]
    (row,) = summary(trials)["faults"]
    assert row == {
        "fault": "worker killed",
        "strategy": "ring",
        "tries": 3,
        "survived": 2,
        "recover_seconds": {"median": 3.0, "max": 4.0},
        "steps_lost": 3,
    }
    assert rows_of(summary([trial(survived=False, recover_s=None)])) == [("worker killed", "ring", "0 of 1", "-", "1")]
    ((_, _, _, recovered, _),) = rows_of(summary(trials))
    assert recovered == "3.0 s, at most 4.0 s"


def test_the_card_is_one_page_that_runs_nothing(tmp_path: Path) -> None:
    trials = [trial(said="<script>")]
    page = write_card(tmp_path, summary(trials), trials, {"machine": "<b>node</b>"}).read_text()
    assert "&lt;b&gt;node" in page and "<script" not in page and "1 of 1" in page and "http" not in page
    document = json.loads((tmp_path / "card.json").read_text())
    assert document["trials"][0]["said"] == "<script>" and document["facts"] == {"machine": "<b>node</b>"}


@pytest.mark.mpi
def test_one_fault_for_real(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = [
        "certify",
        "--strategy",
        "ring",
        "--fault",
        "rank 0 killed, state in memory",
        "--out",
        tmp_path / "card",
        "--json",
    ]
    finished = run_hpcdl(line, timeout_s=300)
    assert finished.code == 0, finished.err
    (row,) = json.loads(finished.out)["faults"]
    assert (row["survived"], row["tries"]) == (1, 1) and row["recover_seconds"]["median"] > 0
    assert row["steps_lost"] <= 10, "a copy every five steps, and the one before where that was under way"
    assert "what this installation survives" in (tmp_path / "card" / "card.html").read_text()
    again = run_hpcdl(line)
    assert again.code == 2 and "choose another folder" in again.err

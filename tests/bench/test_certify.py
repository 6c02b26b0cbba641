"""The resilience card: what it counts, how it looks, and one real fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcdl.bench import certify
from hpcdl.bench.certify import (
    FAULTS,
    LEAVES_NODES_OUT,
    OTHERS_CONTINUE,
    SAVING,
    Plan,
    Trial,
    document_of,
    earlier_trials,
    faults_in,
    lines_left_out,
    read_card,
    rows_of,
    summary,
    try_out,
    write_card,
)
from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.storage.lock import writing
from hpcdl.run.faults import NETWORK, parse_faults
from tests.bench.card_page import PAGE, page
from tests.conftest import CommandLine, finish
from tests.report.synthetic import make_record, write_run
from tests.training_runs import wait_for


def trial(**facts: Any) -> Trial:
    usual = {"fault": "worker killed", "strategy": "ring", "survived": True, "struck": True, "recover_s": 2.0}
    return Trial(**{**usual, "steps_lost": 1, "said": "", **facts})


def plan(**changes: Any) -> Plan:
    usual = {"strategies": ["ring", "ps"], "faults": [*FAULTS], "tries": 2, "num_ranks": 3, "out": Path("card")}
    return Plan(**{**usual, **changes})


def test_everything_is_tried_or_the_reason_why_not_is_reported() -> None:
    chosen = plan(num_nodes=1, strategies=["ring", "ps", "grpc-ring"])
    left_out = chosen.left_out()
    assert len(chosen.cases()) == 2 * (3 * len(FAULTS) - len(left_out))
    whys = {(one["fault"], one["strategy"]): one["why"] for one in left_out}
    serving = [fault for fault in FAULTS if fault.startswith("server killed")]
    assert {pair for pair, why in whys.items() if "has no servers" in why} == {
        (fault, strategy) for fault in serving for strategy in ("ring", "grpc-ring")
    }
    assert {strategy for fault, strategy in whys if fault == "skewed clock"} == {"ring", "ps", "grpc-ring"}
    unseen = {fault for (fault, _), why in whys.items() if "so hpcdl cannot delay or drop them" in why}
    assert unseen == {"partition that heals", "partition that stays", "slow link"}
    assert len(serving) == 2 and len(whys) == 4 + 3 + 3
    assert not plan(num_nodes=2, strategies=["ps"]).left_out(), "other nodes are there to be cut off"
    with pytest.raises(UnknownNameError, match="unknown fault 'flood'"):
        plan(faults=["flood"]).cases()
    in_memory = "rank 0 killed, state in memory"
    assert faults_in(in_memory) == [in_memory] and faults_in("slow link") == ["slow link"]
    assert faults_in(f"rank 0 killed,{in_memory}, slow link") == ["rank 0 killed", in_memory, "slow link"]
    with pytest.raises(UnknownNameError, match=r"unknown fault 'flod'; known: .*'rank 0 killed, state in memory', 'ra"):
        faults_in("slow link,flod")


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_can_be_injected(fault: str, num_nodes: int) -> None:
    words = plan(num_nodes=num_nodes).words(fault, "ring")
    if num_nodes == 1 and fault == "skewed clock":
        assert "skewed clock" in {one["fault"] for one in plan(num_nodes=1).left_out()}
        return
    (found,) = parse_faults(words[words.index("--inject") + 1], 3, num_nodes)
    assert found.of_host == (num_nodes > 1 and found.kind in NETWORK)


def test_a_node_that_is_gone_for_good_leaves_a_run_with_fewer_workers() -> None:
    assert "--min-workers" in plan(num_nodes=3).words("partition that stays", "ring")
    assert "--min-workers" not in plan(num_nodes=1).words("partition that stays", "ring"), "a new rank is not cut off"


@pytest.mark.parametrize("strategy, least", [("ring", "1"), ("sync-easgd", "2"), ("hogwild-sgd", "2"), ("ps", "1")])
def test_who_continues_without_a_rank_may_have_fewer_workers(strategy: str, least: str) -> None:
    assert len(OTHERS_CONTINUE) == 3
    for fault in OTHERS_CONTINUE:
        kept, shrunk = (plan().words(one, strategy) for one in (fault.partition(",")[0], fault))
        assert shrunk == [*kept[:2], "--min-workers", least, *kept[2:]]


def test_a_rank_that_takes_few_of_the_steps_comes_to_the_one_that_is_struck() -> None:
    for strategy, expected in (("ring", "kill:rank=1@step=30"), ("async-easgd", "kill:rank=1@step=10")):
        assert plan().words("worker killed", strategy)[-1] == expected


def test_of_two_ranks_nobody_continues_but_with_servers() -> None:
    whys = {(one["fault"], one["strategy"]): one["why"] for one in plan(num_ranks=2).left_out()}
    assert "fewer than two of " in whys["worker killed, the others continue", "ring"]
    assert ("worker killed, the others continue", "ps") not in whys


def test_how_a_run_saves_is_reported_for_faults_that_there_are() -> None:
    assert {*SAVING, *LEAVES_NODES_OUT} <= set(FAULTS)
    assert plan().words("rank 0 killed, state in memory", "ring")[:2] == ["--checkpoint-every", "1h"]


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


def test_a_run_that_its_fault_never_struck_is_no_try() -> None:
    never = trial(struck=False, survived=False, recover_s=None, steps_lost=0)
    assert [row[2] for row in rows_of(summary([trial(), trial(), never]))] == ["2 of 2, 1 not struck"]
    (row,) = summary([never])["faults"]
    assert (row["tries"], row["survived"], row["not_struck"]) == (0, 0, 1)


def test_a_run_that_fails_before_its_fault_strikes_did_not_survive() -> None:
    (row,) = summary([trial(struck=False, survived=False, recover_s=None, steps_lost=0, said="no MPI")])["faults"]
    assert (row["tries"], row["survived"]) == (1, 0) and "not_struck" not in row


def test_resume_repeats_a_run_that_its_fault_never_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run itself is left out: whether one is started is looked at."""
    started: list[str] = []

    def run(strategy: str, fault: str, *others: object) -> Trial:
        started.append(fault)
        return trial(fault=fault, strategy=strategy)

    monkeypatch.setattr("hpcdl.bench.certify._try", run)
    wanted = plan(out=tmp_path, strategies=["ring"], faults=["worker killed"], tries=1)
    never = trial(struck=False, survived=False, recover_s=None, steps_lost=0)
    for earlier, repeats in ((never, 1), (trial(), 0)):
        started.clear()
        assert len(try_out(wanted, [earlier], lambda text: None, lambda ended: None)) == 1 + repeats
        assert len(started) == repeats


def test_a_card_that_continued_elsewhere_names_every_machine_and_version(tmp_path: Path) -> None:
    for number, (machine, version) in enumerate([("first", "5.0.2"), ("second", "5.0.3"), ("first", "5.0.2")]):
        record = make_record(
            machine=machine, software={"hpcdl": "1", "mpi": version}, started_at=f"2026-01-0{number + 1}"
        )
        write_run(tmp_path / "runs" / str(number), record)
    write_card(plan(out=tmp_path), [trial()])
    facts = json.loads((tmp_path / "card.json").read_text())["facts"]
    assert (facts["machine"], facts["software"]) == ("first, second", "hpcdl 1, mpi 5.0.2, mpi 5.0.3")


def test_what_was_not_tried_is_reported_once_for_each_reason() -> None:
    document = summary([trial()], plan(num_nodes=1, faults=["skewed clock", "server killed"]).left_out())
    assert lines_left_out(document) == [
        "skewed clock (ring, ps): all ranks are on one node and share its clock",
        "server killed (ring): ring has no servers",
    ]


def test_a_run_that_does_not_end_is_one_that_has_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "RUN_TIMEOUT_S", 0.1)
    assert certify._run(["sleep", "60"]) == (None, "the run had not ended after 100 ms")


def test_the_card_is_one_page_that_runs_nothing(tmp_path: Path) -> None:
    trials, one_node = [trial(said="<script>", fault="<i>flood", load=3.0)], plan(out=tmp_path, num_nodes=1)
    page = write_card(one_node, trials).read_text()
    assert "Not tried here" in page and "skewed clock (ring, ps): all ranks are on one node" in page
    assert (
        "&lt;i&gt;flood" in page
        and "<script" not in page
        and "1 of 1" in page
        and "http:" not in page
        and "https:" not in page
    )
    assert "Not tried" not in write_card(plan(out=tmp_path, faults=["worker killed"]), trials).read_text()
    document = json.loads((tmp_path / "card.json").read_text())
    assert document["trials"][0]["said"] == "<script>"
    assert document["facts"]["ranks"] == "3" and document["facts"]["load"].startswith("3.0 to 3.0, of ")
    text = (tmp_path / "card.md").read_text()
    assert "| &lt;i&gt;flood | ring | 1 of 1 | 2.0 s | 1 |" in text and "- ranks: 3\n" in text
    assert read_card(tmp_path / "card.json")[1] == trials


def test_a_card_continues_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--nodes 2, but this job has 1"):
        earlier_trials(plan(out=tmp_path, num_nodes=1), 2, resume=True)
    assert earlier_trials(plan(out=tmp_path), None, resume=True) == []
    write_card(plan(out=tmp_path), [trial(), trial(struck=False, survived=False)])
    assert earlier_trials(plan(out=tmp_path), None, resume=True) == [trial()]
    more = document_of(plan(out=tmp_path, strategies=["ps"], faults=["server killed"]), [trial()])
    assert lines_left_out(more) == ["server killed (ring): ring has no servers"]
    with pytest.raises(UsageError, match="continue its card with --resume"):
        earlier_trials(plan(out=tmp_path), None, resume=False)
    with pytest.raises(UsageError, match="was made with 3 ranks, not with 4"):
        earlier_trials(plan(out=tmp_path, num_ranks=4), None, resume=True)
    (tmp_path / "card.json").unlink()
    (tmp_path / "of my own.txt").touch()
    with pytest.raises(UsageError, match="has no card"):
        earlier_trials(plan(out=tmp_path), None, resume=True)


def test_a_second_call_and_a_folder_that_cannot_be_used_are_refused_before_any_run(tmp_path: Path) -> None:
    """The runs of a second call would find the first's run directories, and count as not survived."""
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="File exists; choose another folder"):
        earlier_trials(plan(out=tmp_path / "notes.txt"), None, resume=False)
    out = tmp_path / "card"
    earlier_trials(plan(out=out), None, resume=False)
    with writing(out):
        assert earlier_trials(plan(out=out), None, resume=False) == []
        with pytest.raises(UsageError, match="another hpcdl writes to"):
            try_out(plan(out=out), [], print, print)
    write_card(plan(out=out), [trial()])
    (out / "card.md").write_text("with my remarks")
    with pytest.raises(UsageError, match=r"card\.md exists, and is not a file that hpcdl wrote"):
        earlier_trials(plan(out=out), None, resume=True)


@pytest.mark.mpi
def test_one_fault_for_real(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """One real fault: stopped in its first run and then finished; the stopped run is kept beside the counted one."""
    card = tmp_path / "card"
    line = ["certify", "--strategy", "ring", "--fault", "rank 0 killed, state in memory", "--out", card, "--json"]
    process = run_hpcdl.start(line)
    wait_for(lambda: (card / "runs").is_dir() and any((card / "runs").iterdir()))
    process.terminate()
    stopped = finish(process)
    assert stopped.code == 75 and "stopped after 0 runs, 1 left to do; continue with --resume" in stopped.err
    finished = run_hpcdl([*line, "--resume"], timeout_s=300)
    assert finished.code == 0, finished.err
    reported = "ring, rank 0 killed, state in memory: survived, continued after "
    assert any(one.startswith(reported) and one.endswith("steps lost") for one in finished.err.splitlines()), (
        finished.err
    )
    (row,) = json.loads(finished.out)["faults"]
    assert (row["survived"], row["tries"]) == (1, 1) and row["recover_seconds"]["median"] > 0
    assert row["steps_lost"] <= 10, "a copy every five steps, and the one before where that was under way"
    assert "What this installation survives" in (card / "card.html").read_text()
    assert len(list((card / "runs").iterdir())) == 2
    again = run_hpcdl(line)
    assert again.code == 2 and "choose another folder" in again.err
    before = sorted(card.rglob("*"))
    assert run_hpcdl([*line, "--resume"]).json()["faults"] == [row] and sorted(card.rglob("*")) == before


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ring", "ps", "async-easgd"])
def test_one_node_survives_all_that_can_be_tried_on_it(run_hpcdl: CommandLine, tmp_path: Path, strategy: str) -> None:
    finished = run_hpcdl(["certify", "--strategy", strategy, "--out", tmp_path / "card", "--json"], timeout_s=1800)
    assert finished.code == 0, finished.err
    document = json.loads(finished.out)
    found = {row["fault"]: row["survived"] for row in document["faults"]}
    assert set(found.values()) == {1}, (tmp_path / "card" / "card.json").read_text()
    assert {*found} | {one["fault"] for one in document["left_out"]} == set(FAULTS)
    assert {"partition that heals", "partition that stays", "slow link"} <= set(found)


def test_the_page_of_cards_states_what_the_cards_hold() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "python -m tests.bench.card_page"

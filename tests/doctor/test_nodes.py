"""Differences between nodes are found, in recorded answers and in those of this node."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.doctor import survey
from hpcdl.doctor.links import judge, rounds
from hpcdl.doctor.nodes import NUMBERS, TEXTS, absent, compare
from hpcdl.doctor.nodes import survey as ask
from hpcdl.doctor.survey import NodeAnswer, networks, read_answers
from hpcdl.doctor.table import OK, Finding, Subject
from tests.conftest import CommandLine

ALIKE = dict.fromkeys(TEXTS, "as everywhere")
RATES = {"memory-gib": 188.0, "free-memory-gib": 180.0, "gflops": 2000.0, "copy-gib-s": 10.0, "load": 0.1}


def cluster(num_nodes: int = 5) -> list[NodeAnswer]:
    """Return nodes of one kind, whose rates vary by two percent as real ones do."""
    return [
        NodeAnswer(host=f"c{i}", texts=ALIKE, numbers={**RATES, "gflops": 2000.0 * (1 + 0.01 * (i % 3 - 1))})
        for i in range(num_nodes)
    ]


def wrong(answers: list[NodeAnswer]) -> list[Finding]:
    return [finding for finding in compare(answers) if finding.level != OK]


def test_sound_nodes_differ_in_nothing() -> None:
    assert wrong(cluster()) == [] and wrong(cluster(1)) == []
    assert {finding.check for finding in compare(cluster())} == {*TEXTS, *NUMBERS}


@pytest.mark.parametrize("name", TEXTS)
def test_a_node_that_is_otherwise_is_named(name: str) -> None:
    answers = cluster()
    answers[3] = replace(answers[3], texts={**ALIKE, name: "otherwise"})
    (finding,) = wrong(answers)
    assert (finding.check, finding.level) == (name, TEXTS[name][0]) and finding.remedy
    assert finding.text == "c3 has otherwise; the others as everywhere"


def test_two_nodes_and_two_halves_are_both_shown() -> None:
    answers = cluster(4)
    answers[:2] = [replace(answer, texts={**ALIKE, "kernel": "6.1"}) for answer in answers[:2]]
    (finding,) = wrong(answers)
    assert "c0, c1" in finding.text and "c2, c3" in finding.text


@pytest.mark.parametrize("name", NUMBERS)
def test_a_node_that_has_less_is_named_with_how_much(name: str) -> None:
    answers = cluster()
    answers[2] = replace(answers[2], numbers={**RATES, name: RATES[name] / 2, "load": 31.5})
    (finding,) = wrong(answers)
    assert finding.check == name and finding.text.startswith("c2: ") and finding.remedy
    assert re.search("(49|50|51)%", finding.text) and "load is 31.5" in finding.text


def test_many_nodes_make_few_lines() -> None:
    answers = [
        replace(answer, numbers={**RATES, "gflops": 100.0 if number < 40 else 2000.0})
        for number, answer in enumerate(cluster(128))
    ]
    answers[:64] = [
        replace(answer, findings=(("failure", "scratch", "/tmp is full", "clear"),)) for answer in answers[:64]
    ]
    found = wrong(answers)
    assert len(found) == 10 and "32 more nodes" in found[8].text
    assert found[9].text == "c0, c1, c2, c3, c4, c5, c6, c7 and 56 more: /tmp is full"


def test_silent_nodes_are_named() -> None:
    hosts = ["c0.cluster", "c1.cluster", "c2.cluster"]
    (finding,) = absent(cluster(2), hosts, 3)
    assert finding.text == "2 of 3 nodes answered: c2.cluster" and finding.level == "failure"
    assert list(absent(cluster(3), hosts, 3)) == []
    (finding,) = absent(cluster(2), ["x1", "x2", "x3"], 3)  # names known to the launcher but not to the nodes
    assert finding.text == "2 of 3 nodes answered"


def test_answers_are_found_in_whatever_a_launcher_hands_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(survey, "MULTIPLY_S", 0.0)
    monkeypatch.setattr(survey, "COPY_S", 0.0)
    monkeypatch.setenv("SLURMD_NODENAME", "c7")
    marks = list(survey.marks(tmp_path / "gone"))
    assert max(map(len, marks)) < 1000  # fits one message of srun
    printed = "srun: chatter\n" + "".join(marks) + '<<hpcdl c8 text kernel "half' + "\x1b[2J"
    (answer,) = read_answers(printed).values()
    assert answer.host == "c7" and {*answer.texts} == {*TEXTS} and {*answer.numbers} == {*RATES}
    assert "is not there" in answer.texts["data"] and answer.numbers["gflops"] > 0.1
    hostile = json.dumps("6.1\x1b[2J")
    assert "\x1b" not in read_answers(f"<<hpcdl c1 text kernel {hostile}>>")["c1"].texts["kernel"]


def test_networks_that_are_up(tmp_path: Path) -> None:
    files = {
        "net/ib0/operstate": "up", "net/ib0/mtu": "2044", "net/eth0/operstate": "up", "net/eth0/speed": "25000",
        "net/eth0/mtu": "9000", "net/eth1/operstate": "down", "net/lo/operstate": "unknown", "net/lo/mtu": "65536",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE", "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert list(networks(tmp_path)) == [
        "eth0 25000 Mbit/s, packets of 9000", "ib0 packets of 2044", "mlx5_0/1 200 Gb/sec (4X HDR) active",
    ]  # fmt: skip


@pytest.mark.parametrize("num_ranks", range(2, 12))
def test_every_link_of_the_ring_once_and_no_rank_twice_at_a_time(num_ranks: int) -> None:
    together = list(rounds(num_ranks))
    assert len(together) <= 3
    for pairs in together:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    ring = {frozenset((rank, (rank + 1) % num_ranks)) for rank in range(num_ranks)}
    assert {frozenset(pair) for pairs in together for pair in pairs} == ring
    assert sum(map(len, together)) == len(ring)


def test_a_slow_node_is_distinguished_from_a_slow_link() -> None:
    sound = [("c0", "c1", 1e-3), ("c1", "c2", 1.1e-3), ("c2", "c3", 1e-3), ("c3", "c4", 1e-3), ("c4", "c0", 0.9e-3)]
    (finding,) = judge(sound)
    assert finding.level == OK
    (finding,) = judge([*sound[:1], ("c1", "c2", 5e-3), *sound[2:]])
    assert finding.text.startswith("c1 - c2: ") and finding.level == "warning"
    (finding,) = judge([*sound[:1], ("c1", "c2", 5e-3), ("c2", "c3", 6e-3), *sound[3:]])
    assert finding.text.startswith("c2, over all of its links: ")


def test_what_cannot_be_asked_is_refused(ask_hpcdl: CommandLine) -> None:
    for words, reported in (
        (["--nodes", "many"], "give a number of nodes, or `all`"),
        (["--nodes", "3"], "this job has 1"),
        (["--nodes", "all", "--only", "mpi"], "--only goes with checks of this node"),
    ):
        finished = ask_hpcdl(["doctor", *words])
        assert finished.code == 2 and reported in finished.err and not finished.out
    with pytest.raises(UsageError):
        ask(Subject(), "0")


def test_one_node_answers_for_itself(run_hpcdl: CommandLine) -> None:
    finished = run_hpcdl(["doctor", "--nodes", "all", "--json"])
    document = finished.json()
    (node,) = document["nodes"]
    assert node["numbers"]["gflops"] > 0 and node["texts"]["kernel"]
    assert any(finding["text"] == "one node: nothing to compare" for finding in document["findings"])
    assert finished.code == (1 if document["failures"] else 0)

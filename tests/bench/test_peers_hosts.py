"""`python -m benchmarks.peers_hosts`: its arguments, what the peers wait for, and its table."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import peers_hosts
from benchmarks.peers.waits import Waits
from hpcdl.core.errors import UsageError
from hpcdl.models.table import model_info

GIVEN = argparse.Namespace(network="lenet", hosts=2, steps=1, tries=2, rate="1gbit", seconds=0.3)


def tried(
    engine: str, number: int, *, step: float = 2.0, exposed: float = 1.0, error: str = ""
) -> peers_hosts.HostsTry:
    return peers_hosts.HostsTry(
        network="lenet", engine=engine, number=number, batch_size=1, steps=1, load=1.0, step_seconds=step,
        compute_seconds=step - exposed, sent_bytes=2e6, error=error,
    )  # fmt: skip


def measured(printed: str) -> peers_hosts.HostsTry:
    counts = iter([[0, 0], [4_000_000, 4_000_000]])
    return peers_hosts.measure("horovod", 1, lambda: printed, lambda: next(counts), GIVEN)


@pytest.mark.parametrize(
    "words, reported",
    [
        ("--engines horovot", "did you mean"),
        ("--network lenett", "did you mean"),
        ("--hosts 1", "--hosts is 2 to 64"),
        ("--hosts 65", "--hosts is 2 to 64"),
        ("--tries 0", "--tries and --steps are 1 or more"),
        ("--seconds nan", "--seconds is above 0"),
        ("--rate fast", "--rate 'fast': give mbit or gbit"),
        ("--colour", "unrecognized arguments"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_2(words: str, reported: str) -> None:
    with pytest.raises(UsageError) as caught:
        peers_hosts.main(words.split())
    assert reported in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_peers_wait_for_the_pieces_of_the_emulation_and_as_long(tmp_path: Path) -> None:
    plan = tmp_path / "waits.json"
    plan.write_text(json.dumps(peers_hosts.plan_of_waits("lenet", 0.3)))
    waits = Waits(plan)
    assert waits.pieces[:4] == [[[10]], [[500, 10]], [[500]], [[800, 500]]] and len(waits.pieces) == 8
    began = time.monotonic()
    waits.forward()
    assert time.monotonic() - began >= 0.1
    waits.backward(3)
    assert time.monotonic() - began >= 0.2
    waits.backward(7)
    assert time.monotonic() - began >= 0.3


def test_an_attempt_records_what_a_host_sent_for_a_step_and_what_went_wrong() -> None:
    good = {"step_seconds": 2.0, "compute_seconds": 1.5, "ranks": 2, "parameters": model_info("lenet").parameters}
    one = measured("a word\n" + json.dumps(good))
    assert (one.exposed_seconds, one.sent_bytes, one.error) == (0.5, 1e6, "")
    assert "1 ranks of 431,080 parameters" in measured(json.dumps(good | {"ranks": 1})).error
    assert "2 ranks of 7 parameters" in measured(json.dumps(good | {"parameters": 7})).error
    assert measured("no document").error

    def fails() -> str:
        raise SystemExit("the ranks failed:\nno such host\n")

    def hangs() -> str:
        raise subprocess.TimeoutExpired("mpirun", 580)

    assert peers_hosts.measure("ring", 1, fails, lambda: [0, 0], GIVEN).error == "no such host"
    assert "not over after" in peers_hosts.measure("ring", 1, hangs, lambda: [0, 0], GIVEN).error


def test_ratios_are_of_the_same_try_and_a_failed_engine_is_a_row_that_says_so() -> None:
    tries = [
        tried("ring", 1, step=1.0, exposed=0.5),
        tried("horovod", 1, step=2.0, exposed=2.0),
        tried("pytorch-ddp", 1, error="no route"),
        tried("ring", 2, step=3.0, exposed=0.5),
        tried("horovod", 2, step=2.0, exposed=1.0),
        tried("pytorch-ddp", 2, error="no route"),
    ]
    head, ring, horovod, pytorch = peers_hosts.rows(tries)
    assert head.split("  ")[0] == "engine" and "ring / it: exposed" in head
    assert " ".join(ring.split()) == "hpcdl ring 2.000 (1.000..3.000) 0.500 (0.500..0.500) 2 (2..2)"
    assert "1.000 (0.500..1.500)" in horovod and "0.375 (0.250..0.500)" in horovod
    assert pytorch == "PyTorch DDP (0 of 2: no route)"


def test_no_ratio_to_an_exchange_that_is_lost_in_noise() -> None:
    for own, other in ((0.1, -0.1), (-0.1, 0.1)):
        tries = [tried("ring", 1, exposed=own), tried("horovod", 1, exposed=other)]
        assert peers_hosts.ratios(tries, "ring", tries[1:], lambda one: one.exposed_seconds) == ""


def test_the_head_names_what_the_links_alone_need() -> None:
    assert "1.7 MB from each host, 0.014 s at the links' rate" in peers_hosts.head(GIVEN)

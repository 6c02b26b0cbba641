"""Findings agree with the known truth of synthetic traces."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.comm.observed import BACKWARD, FORWARD, LAYER_UPDATE
from hpcdl.core.errors import UsageError
from hpcdl.core.records.run_record import PARTS as RECORD_PARTS
from hpcdl.core.records.run_record import RunRecord, write_record
from hpcdl.launch import traced
from hpcdl.trace import counters
from hpcdl.trace.file import COUNTER
from hpcdl.trace.findings import findings
from hpcdl.trace.page import page, tables
from hpcdl.trace.recorder import COLLECTOR
from hpcdl.trace.steps import BEGAN, EXCHANGED, Merged, Steps, merge, steps_of
from hpcdl.trace.stragglers import _rates
from tests.conftest import patience
from tests.trace.made import EXCHANGE_S, NAMES, OTHER_S, UPDATE_S, records, synchronous, trace

RANKS, STEPS = 4, 60
TRIES = 20


def even(value: float, seed: int = 0, noise: float = 0.05) -> Any:
    return value * (1 + noise * numpy.random.default_rng(seed).standard_normal((RANKS, STEPS)))


def test_parts_waits_and_the_path_of_a_step() -> None:
    compute_s = numpy.full((2, 4), 0.1)
    compute_s[1, :3], compute_s[0, 3] = 0.15, 0.14
    merged, steps = synchronous(numpy.full((2, 4), 0.01), compute_s, hidden_s=0.02)
    found = findings(merged, steps)
    assert (found.steps, found.ranks) == (4, 2)
    step_s = (0.15 * 3 + 0.14) / 4 + 0.01 + EXCHANGE_S + UPDATE_S + OTHER_S
    assert found.step_s == pytest.approx(step_s)
    assert {(one.rank, one.for_rank): one.seconds_per_step for one in found.waits} == pytest.approx(
        {(0, 1): 0.05 * 3 / 4, (1, 0): 0.04 / 4}
    )
    path = {one.part: one.seconds_per_step for one in found.critical_path}
    assert sum(path.values()) == pytest.approx(step_s)
    assert path["compute"] == pytest.approx((0.15 * 3 + 0.14) / 4)
    assert path["exposed_communication"] == pytest.approx(EXCHANGE_S)
    gains = {one.part: one.gain_s for one in found.critical_path}
    assert gains["input"] == pytest.approx(0.01) and gains["compute"] == pytest.approx(path["compute"])
    assert found.parts == pytest.approx(
        dict(zip(RECORD_PARTS, (0.01, 0.12375, 0.02375, EXCHANGE_S, UPDATE_S, OTHER_S), strict=True)),
        abs=1e-9,
    )
    bucket_s = EXCHANGE_S + found.parts["wait"]
    assert found.overlap == pytest.approx(0.02 / (0.02 + bucket_s))
    gap_s = (0.15 + 0.01 + EXCHANGE_S + OTHER_S, 0.14 + 0.01 + EXCHANGE_S + OTHER_S)
    assert (found.gaps.count_per_step, found.gaps.median_s) == (1.0, pytest.approx(gap_s[0]))
    assert found.gaps.usable_s_per_step == pytest.approx(0.01 + found.parts["wait"] + EXCHANGE_S)


def test_a_gap_ends_where_the_first_weights_move() -> None:
    """A bucket's update that begins 3 ms before the last bucket arrives makes the gap 3 ms shorter."""
    calm = even(0.01), even(0.1)
    _, steps = synchronous(*calm)
    came_s = steps.borders[0, :, EXCHANGED]
    early = [
        records("updating", came_s - before_s, came_s, numpy.arange(came_s.size), bucket=number)
        for number, before_s in enumerate((0.003, 0.001))
    ]
    plain = findings(*synchronous(*calm)).gaps
    found = findings(*synchronous(*calm, more=dict.fromkeys(range(calm[0].shape[0]), early), ahead_s=0.0)).gaps
    assert plain.median_s is not None
    assert (found.median_s, found.count_per_step) == (pytest.approx(plain.median_s - 0.003), 1.0)


CALM_S = numpy.full((RANKS, STEPS), 0.01), numpy.full((RANKS, STEPS), 0.1)


def layered(spans: Mapping[str, tuple[float, float]], layer: str) -> list[Any]:
    """Return the same spans of one layer in each step of CALM_S, relative to the step's begin."""
    _, steps = synchronous(*CALM_S)
    numbers, began_s = numpy.arange(len(steps.numbers)), steps.borders[0, :, BEGAN]
    bucket = NAMES.index(layer)
    return [records(kind, began_s + a, began_s + b, numbers, bucket=bucket) for kind, (a, b) in spans.items()]


def test_layers_have_times_and_gaps_of_their_own() -> None:
    """Each layer has its own times and gaps: in steps of 136 ms, conv1 updates for 4 ms and dense for 1 ms."""
    dense = {FORWARD: (0.03, 0.04), BACKWARD: (0.04, 0.06), LAYER_UPDATE: (0.10, 0.101)}
    conv1 = {FORWARD: (0.01, 0.03), BACKWARD: (0.06, 0.11), LAYER_UPDATE: (0.131, 0.135)}
    more = {rank: [*layered(dense, "dense"), *layered(conv1, "conv1")] for rank in range(RANKS)}
    first, second = findings(*synchronous(*CALM_S, more=more, ahead_s=0.0)).layers
    assert (first.layer, second.layer) == ("conv1", "dense")
    assert (first.forward_s, first.backward_s, first.update_s) == pytest.approx((0.02, 0.05, 0.004))
    assert (first.gap_median_s, second.gap_median_s) == pytest.approx((0.132, 0.135))
    assert second.gap_p90_s == pytest.approx(0.135)


def test_layers_of_which_only_gradients_are_known_stand_in_the_order_of_calls() -> None:
    """With gradients only, as in a script, layers are in call order without forward times or first gap."""
    spans = [*layered({BACKWARD: (0.04, 0.06)}, "dense"), *layered({BACKWARD: (0.06, 0.11)}, "conv1")]
    found = findings(*synchronous(*CALM_S, more={1: spans}, ahead_s=0.0))
    assert [(one.layer, one.forward_s, one.gap_median_s) for one in found.layers] == [
        ("conv1", None, None),
        ("dense", None, None),
    ]
    assert found.layers[1].backward_s == pytest.approx(0.02)
    assert "conv1" in str(list(tables(found)))


def test_what_hosts_carry_is_reported_over_time_and_against_the_link() -> None:
    """Network traffic is reported over time and against the link: 60 steps of 0.136 s, 50 MiB per second on host 1."""
    rates = [{counters.NETWORK: 50 * 2**20 * (rank == 1)} for rank in range(RANKS)]
    merged, steps = synchronous(*CALM_S, rates=rates)
    (reported,) = findings(merged, steps, link_bytes_per_second=100 * 2**20).network
    assert (reported.host, len(reported.rates)) == ("host1", 9)
    assert (reported.mean, reported.busiest, reported.link_share) == pytest.approx((50 * 2**20, 50 * 2**20, 0.25))
    assert reported.times_s[0] == pytest.approx(0.0, abs=1e-3), "on rank 0's clock"
    (unknown,) = findings(merged, steps).network
    assert unknown.link_share is None
    drawn = page("run", merged, steps, findings(merged, steps))
    assert drawn.count('role="img"') == 4 and "Network, in and out: at most 50 MiB in a second" in drawn
    assert "host1" in str(list(tables(findings(merged, steps))))


def test_the_json_is_what_is_promised() -> None:
    merged, steps = synchronous(even(0.01), even(0.1))
    document = json.loads(json.dumps(findings(merged, steps).as_json(), allow_nan=False))
    assert list(document) == [
        "steps", "ranks", "clock", "overlap", "gaps", "waits", "stragglers", "critical_path", "overhead", "background",
        "layers", "network",
    ]  # fmt: skip
    assert set(document["clock"][0]) == {"host", "offset_s", "drift", "error_s"}
    assert set(document["gaps"]) == {"count_per_step", "median_s", "p90_s", "usable_s_per_step"}
    assert set(document["waits"][0]) == {"rank", "for_rank", "seconds_per_step"}
    assert set(document["background"]) == {"in_gaps_s", "outside_s"}
    assert set(document["critical_path"][0]) == {"part", "seconds_per_step"}
    assert document["clock"][2]["offset_s"] == pytest.approx(6.0)
    slow_s = even(0.1)
    slow_s[2] *= 2
    (straggler,) = findings(*synchronous(even(0.01), slow_s)).as_json()["stragglers"]
    assert set(straggler) == {"rank", "host", "cause", "seconds_per_step"}


CALM = {counters.CPU_US: 9e5, counters.WAITED_US: 1e4, counters.SWITCHES: 5.0, counters.CLOCK_KHZ: 2.4e6}


def without(name: str, facts: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in facts.items() if key != name}


def planted(cause: str, seed: int) -> tuple[Merged, Steps]:
    """Return four ranks of which rank 2 is slow by a quarter of its step."""
    input_s, compute_s = even(0.01, seed), even(0.1, seed + 1000)
    rates: list[dict[str, float]] = [dict(CALM) for _ in range(RANKS)]
    more: dict[int, list[Any]] = {}
    if cause == "input":
        input_s[2] += 0.03
    elif cause != "network":
        compute_s[2] += 0.03
    if cause == "processor contention":
        rates[2] |= {counters.WAITED_US: 2e5, counters.SWITCHES: 300.0}
    if cause == "clock frequency":
        rates[2] |= {counters.CLOCK_KHZ: 1.8e6} if seed % 2 else {}
        rates = [without(counters.CLOCK_KHZ, one) for one in rates] if not seed % 2 else rates
    if cause == "collector":
        _, steps = synchronous(input_s, compute_s)
        begin_s = steps.borders[2, :, 1]
        more[2] = [records(COLLECTOR, begin_s + 0.01, begin_s + 0.04, steps.numbers)]
    if cause == "network":
        return behind_a_slow_link(input_s, compute_s, rates)
    return synchronous(input_s, compute_s, rates=rates, more=more)


def behind_a_slow_link(input_s: Any, compute_s: Any, rates: Any) -> tuple[Merged, Steps]:
    """Return a ring whose links from and to rank 2 take five times as long: every rank sees a long exchange."""
    exchange_s = 0.05
    _, steps = synchronous(input_s, compute_s, exchange_s=exchange_s)
    begin_s = steps.borders[:, :, 2].max(axis=0)
    more: dict[int, list[Any]] = {rank: [] for rank in range(RANKS)}
    for sender in range(RANKS):
        receiver = (sender + 1) % RANKS
        took_s = 0.05 if 2 in (sender, receiver) else 0.01
        facts = {"value": 1 << 18}
        # the receiver asks at once; a rank after the slow one gets its data late, but the transfer is quick
        late_s = 0.0 if 2 in (sender, receiver) else 0.04
        sent = records("sending", begin_s + late_s, begin_s + late_s + took_s, steps.numbers, peer=receiver, **facts)
        came = records("receiving", begin_s, begin_s + late_s + took_s, steps.numbers, peer=sender, **facts)
        more[sender].append(sent)
        more[receiver].append(came)
    return synchronous(input_s, compute_s, rates=rates, more=more, exchange_s=exchange_s)


@pytest.mark.parametrize("cause", ["processor contention", "input", "network", "clock frequency", "collector"])
def test_a_planted_straggler_is_named_with_its_cause(cause: str) -> None:
    named = 0
    for seed in range(TRIES):
        found = findings(*planted(cause, seed)).stragglers
        reported = "unknown" if cause == "clock frequency" and not seed % 2 else cause
        named += [(one.rank, one.host, one.cause) for one in found] == [(2, "host2", reported)]
        if found:
            assert found[0].seconds_per_step == pytest.approx(0.03, rel=0.4)
            assert found[0].evidence
    assert named >= TRIES - 1


@pytest.mark.parametrize(("work", "cause"), [(2, "unknown"), (1, "processor contention")])
def test_where_all_stand_in_line_who_computes_for_longer_does_so_for_longer(work: int, cause: str) -> None:
    """With a quarter core per rank, each waits three times as long as it computes, and rank 2 twice as long as others.

    With twice the processor time too, rank 2 has more work or works more slowly. With the same processor time, it has a
    neighbour.
    """
    compute_s = even(0.1)
    compute_s[2] *= 2
    shared = {counters.CPU_US: 1e5, counters.WAITED_US: 3e5, counters.SWITCHES: 40.0}
    rates = [{name: rate * (2 if rank == 2 else 1) for name, rate in shared.items()} for rank in range(RANKS)]
    rates[2][counters.CPU_US] = 1e5 * work
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates)).stragglers
    assert (found.rank, found.cause) == (2, cause)


IDLES, WORKS = "waiting or sleeping", "unknown"


@pytest.mark.parametrize(
    ("others", "slow", "waits", "cause", "evidence"),
    [
        (1.0, 0.55, True, IDLES, "waits, sleeps or is stopped"),
        (3.5, 1.95, True, IDLES, "waits, sleeps or is stopped"),
        (0.45, 0.25, True, IDLES, "waits, sleeps or is stopped"),
        (1.0, 1.0, True, WORKS, "its processors work for it"),
        (3.5, 3.5, True, WORKS, "its processors work for it"),
        (0.1, 0.06, True, WORKS, "something else computes"),
        (1.0, 0.55, False, WORKS, "which this kernel does not tell"),
    ],
)
def test_processor_time_distinguishes_sleep_from_work(
    others: float, slow: float, waits: bool, cause: str, evidence: str
) -> None:
    """Processor time separates waiting from work: rank 2 computes 0.18 s, others 0.1 s, and all poll while waiting."""
    compute_s = even(0.1)
    compute_s[2] += 0.08
    busy = [(slow if rank == 2 else others, 1.0) for rank in range(RANKS)]
    rates = [{counters.WAITED_US: 1e4} if waits else {} for _ in range(RANKS)]
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates, busy=busy)).stragglers
    assert (found.rank, found.cause) == (2, cause) and evidence in found.evidence


def test_who_waits_for_a_processor_as_all_do_does_not_sleep() -> None:
    """On a node that other programs use, a rank that computed longer was said to sleep, and nothing named the waits."""
    compute_s = even(0.1)
    compute_s[2] += 0.08
    busy = [(0.2, 0.75) if rank == 2 else (0.35, 0.3) for rank in range(RANKS)]
    rates = [{counters.WAITED_US: 7e5, counters.PROCESSORS: 1000.0} for _ in range(RANKS)]
    found = findings(*synchronous(even(0.01, 1), compute_s, rates=rates, busy=busy))
    (late,) = found.stragglers
    assert (late.rank, late.cause) == (2, "unknown"), late
    assert "of a step for processors: other programs or ranks use them" in late.evidence
    assert found.processor_waits_s is not None and found.processor_waits_s > 0.5 * found.step_s
    reported = {row[0]: row[1] for row in next(tables(found))[2]}
    assert reported["of a step, waiting for processors"].endswith("ms: other programs or ranks use them")


def test_where_nobody_counted_the_cause_is_unknown() -> None:
    compute_s = even(0.1)
    compute_s[2] += 0.08
    rates = [without(counters.CPU_US, CALM) for _ in range(RANKS)]
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates)).stragglers
    assert (found.cause, "does not tell" in found.evidence) == ("unknown", True)


def test_what_the_others_wait_differently_too_is_no_contention() -> None:
    """Waiting 60 ms/s more than the others' median is no contention, if they differ by up to 50 ms/s themselves."""
    compute_s = even(0.1)
    compute_s[2] += 0.03
    rates = [{counters.CPU_US: 1e5, counters.WAITED_US: 3e5 + more} for more in (5e4, 0.0, 6e4, -4e4)]
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates)).stragglers
    assert (found.rank, found.cause) == (2, "unknown")


@pytest.mark.parametrize(("used", "cause"), [(0.49, "unknown"), (0.2, "processor contention")])
def test_who_uses_all_that_it_may_has_no_neighbours(used: float, cause: str) -> None:
    """A rank that uses all of its half processor has no neighbours: its threads wait for each other."""
    compute_s = even(0.1)
    compute_s[2] += 0.03
    usual = {counters.CPU_US: 4.9e5, counters.WAITED_US: 5e5, counters.PROCESSORS: 500.0}
    rates = [dict(usual) for _ in range(RANKS)]
    rates[2] |= {counters.CPU_US: used * 1e6, counters.WAITED_US: 9e5}
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates)).stragglers
    assert (found.rank, found.cause) == (2, cause)


def test_a_thread_that_ended_takes_no_waits_away() -> None:
    """A thread that ends removes its waiting time from the sum, which does not count as less waiting."""
    rates = [CALM | {counters.WAITED_US: 3e5} for _ in range(RANKS)]
    merged, steps = synchronous(even(0.01, 1), even(0.1), rates=rates)
    counted = merged.traces[2].counters
    waits = numpy.flatnonzero(counted["name"] == merged.traces[2].code(COUNTER + counters.WAITED_US))
    counted["value"][waits[len(waits) * 3 // 4 :]] -= 2 * 10**6
    found = _rates(merged, steps)[counters.WAITED_US]
    assert found[0] == pytest.approx(3e5, rel=0.01) and found[2] == pytest.approx(3e5, rel=0.2)


def test_switches_tell_only_where_nobody_counts_waits() -> None:
    """Switches count only without waiting times: a polling rank yields ten thousands of times per second."""
    compute_s = even(0.1)
    compute_s[2] += 0.03
    rates = [CALM | {counters.SWITCHES: 4e4 if rank == 2 else 500.0} for rank in range(RANKS)]
    rates = [without(counters.CLOCK_KHZ, one) for one in rates]
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates)).stragglers
    assert (found.rank, found.cause) == (2, "unknown")
    rates = [without(counters.WAITED_US, one) for one in rates]
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates)).stragglers
    assert (found.rank, found.cause) == (2, "processor contention")


def test_a_slow_link_is_named_though_its_rank_waits_for_a_processor_too() -> None:
    """A slow link is named although its rank also waits for a processor, by 4 ms per step, too little for 30 ms."""
    input_s, compute_s = even(0.01), even(0.1, 1000)
    compute_s[2] += 0.008
    rates = [CALM | {counters.WAITED_US: 3e4 if rank == 2 else 1e4} for rank in range(RANKS)]
    first, *_ = findings(*behind_a_slow_link(input_s, compute_s, rates)).stragglers
    assert (first.rank, first.cause) == (2, "network")


def test_who_learns_late_of_the_others_is_late_through_no_fault_of_its_own() -> None:
    """A rank that hears late from others (after a slow one in a ring) is not blamed, unless it computes longer too."""
    compute_s = even(0.1)
    assert findings(*synchronous(even(0.01, 1), compute_s, hears_late_s={3: 0.015})).stragglers == []
    compute_s[3] += 0.02
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, hears_late_s={3: 0.015})).stragglers
    assert (found.rank, found.cause, found.seconds_per_step) == (3, "unknown", pytest.approx(0.02, rel=0.2))


def test_a_rank_that_waits_for_its_processor_learns_late_because_of_that() -> None:
    rates = [dict(CALM) for _ in range(RANKS)]
    rates[3][counters.WAITED_US] = 3e5
    compute_s = even(0.1)
    compute_s[3] += 0.005
    (found,) = findings(*synchronous(even(0.01, 1), compute_s, rates=rates, hears_late_s={3: 0.03})).stragglers
    assert (found.rank, found.cause) == (3, "processor contention")
    assert found.seconds_per_step == pytest.approx(0.035, rel=0.2)


def test_a_step_that_stood_still_does_not_hide_a_rank_that_is_late_in_each() -> None:
    compute_s = even(0.1)
    compute_s[2] += 0.03
    compute_s[2, 7] += 2.0
    (found,) = findings(*synchronous(even(0.01, 1), compute_s)).stragglers
    assert (found.rank, found.cause) == (2, "unknown")
    compute_s[2] -= 0.03
    assert findings(*synchronous(even(0.01, 1), compute_s)).stragglers == [], "it alone is none"


def test_updates_are_work_of_a_rank_s_processors_and_none_between_steps() -> None:
    rates = [dict(CALM) for _ in range(RANKS)]
    rates[2][counters.WAITED_US] = 2e5
    (found,) = findings(*synchronous(even(0.01, 1), even(0.1), rates=rates, updates_longer_s={2: 0.03})).stragglers
    assert (found.rank, found.cause, found.seconds_per_step) == (
        2,
        "processor contention",
        pytest.approx(0.03, rel=0.2),
    )


def test_nobody_is_named_where_all_are_alike() -> None:
    for seed in range(TRIES):
        assert findings(*synchronous(even(0.01, seed), even(0.1, seed + 50))).stragglers == []


def test_waits_within_the_error_bars_are_nobodys() -> None:
    compute_s = numpy.full((2, 5), 0.1)
    compute_s[1] += 5e-7
    merged, steps = synchronous(numpy.full((2, 5), 0.01), compute_s)
    assert findings(merged, steps).waits == []


def test_one_rank_and_no_common_steps() -> None:
    merged, steps = synchronous(numpy.full((1, 3), 0.01), numpy.full((1, 3), 0.1))
    found = findings(merged, steps)
    assert (found.overlap, found.waits, found.stragglers) == (None, [], [])
    assert sum(one.seconds_per_step for one in found.critical_path) == pytest.approx(found.step_s)
    merged, _ = synchronous(even(0.01), even(0.1))
    alone = steps_of(merged, synchronous=False)
    found = findings(merged, alone)
    assert found.stragglers == [] and found.parts["wait"] == 0
    assert sum(one.seconds_per_step for one in found.critical_path) == pytest.approx(found.step_s)


def test_only_steps_that_every_rank_has_kept_count() -> None:
    whole, _ = synchronous(numpy.full((2, 10), 0.01), numpy.full((2, 10), 0.1))
    ring = {rank: one.records for rank, one in whole.traces.items()}
    newest = ring[0][ring[0]["step"] >= 4]
    newest = newest[(newest["step"] > 4) | (newest["name"] > 2)]  # the ring has kept only a part of step 4
    cut = merge([trace(0, 2, [newest]), whole.traces[1]])
    assert steps_of(cut, synchronous=True).numbers.tolist() == [5, 6, 7, 8, 9]
    assert steps_of(cut, synchronous=True, first=7).numbers.tolist() == [7, 8, 9]
    assert steps_of(cut, synchronous=True, first=100).numbers.tolist() == [5, 6, 7, 8, 9]
    oldest = merge([trace(0, 2, [newest]), trace(1, 2, [ring[1][ring[1]["step"] < 5]])])
    with pytest.raises(UsageError, match="no step is in every worker's trace"):
        steps_of(oldest, synchronous=True)
    with pytest.raises(UsageError, match="holds no step of a worker"):
        steps_of(
            merge([trace(0, 1, [records(COLLECTOR, numpy.zeros(1), numpy.ones(1), numpy.zeros(1))])]), synchronous=True
        )


def test_eight_ranks_and_ten_thousand_steps_are_quick_and_small() -> None:
    random = numpy.random.default_rng(0)
    compute_s = random.uniform(0.1, 0.12, (8, 10_000))
    merged, _ = synchronous(numpy.full((8, 10_000), 0.01), compute_s, hidden_s=0.05)
    before_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    again = merge(list(merged.traces.values()))
    steps = steps_of(again, synchronous=True)
    found = findings(again, steps)
    drawn = page("x", again, steps, found)
    assert found.steps == 10_000 and "<svg" in drawn
    assert time.process_time() - before_s < patience(5.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize(
    ("num_steps", "workers", "said"),
    [
        (3, 2, "all traced steps are warm-up"),
        (6, 2, "only 3 steps after the warm-up"),
        (20, 8, "traces of 2 of 8 workers; waiting for the others counts as communication"),
        (20, 2, ""),
    ],
)
def test_what_a_trace_cannot_show_is_said(
    num_steps: int, workers: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged, _ = synchronous(numpy.full((2, num_steps), 0.01), numpy.full((2, num_steps), 0.1))
    monkeypatch.setattr(traced, "read_run", lambda _: [])
    monkeypatch.setattr(traced, "merge", lambda _: merged)
    facts: dict[str, Any] = {
        "ranks": workers,
        "workers": workers,
        "batch_per_rank": 1,
        "global_batch": workers,
        "warmup_steps": 3,
    }
    write_record(tmp_path, RunRecord(strategy="ring", model="lenet", data="d", **facts))
    lines: list[str] = []
    traced.look_into(tmp_path, lines.append)
    assert len(lines) == bool(said) and all(said in line for line in lines)

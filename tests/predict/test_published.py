"""Published systems: predict the largest size from a quarter of it or from one node.

Numbers marked as recalled are not confirmed: they test the method, and no other claim rests on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from hpcdl.predict.answer import Question, answer
from hpcdl.predict.evidence import Evidence
from hpcdl.predict.forecast import Forecast, Range
from hpcdl.predict.jobs import RankLayout, StepJob, lengths_of
from hpcdl.predict.network import Network, read_network
from hpcdl.predict.timeline import exchange_seconds
from hpcdl.report.runs.published import Reference, load_references
from hpcdl.report.runs.run import Run
from tests.conftest import CommandLine
from tests.report.synthetic import make_run

KNL_FLOP_PER_SECOND = 0.6e12
"""Rate of TensorFlow on a KNL node at that time: a tenth of peak, within a factor of 1.5."""


def near(found: Range, published: float) -> bool:
    """Return whether the prediction is within 10 %, or its interval holds the published value."""
    return abs(found.mean / published - 1) <= 0.10 or found.low <= published <= found.high


def sampled(cases: Iterable[Any]) -> list[Any]:
    """Return the cases with all but the first marked as soak tests."""
    first, *others = cases
    return [first, *(pytest.param(case, marks=pytest.mark.soak) for case in others)]


def knl_node(model: str, batch: int, macs: float, flop_per_second: float = KNL_FLOP_PER_SECOND) -> Evidence:
    """Return one-node facts: computing time from MACs; nothing from many nodes."""
    seconds = 6 * macs / flop_per_second
    return Evidence(
        model=model, monitors=(), stated={"image_s": (seconds, 0.4), "update_s": (0.02 * seconds * batch, 1.0)},
        layouts={"grpc-ps": RankLayout(workers_per_node=1)}, batch=batch,
    )  # fmt: skip


CORI = {
    (point.model, point.workers): point
    for point in load_references().points
    if point.source == "Cori" and point.strategy == "grpc-ps"
}


@pytest.mark.parametrize("point", CORI.values(), ids=[f"{model}-{workers}" for model, workers in CORI])
def test_cori_s_servers_from_facts_alone(ask_hpcdl: CommandLine, point: Reference) -> None:
    """Cori's servers are predicted from facts alone: names of network, machine and model, without manual settings."""
    nodes = str(point.workers + point.servers)
    line = ["predict", "--model", point.model, "--machine", "cori-knl", "--network", "aries", "--strategy", "grpc-ps"]
    (row,) = ask_hpcdl([*line, "--servers", str(point.servers), "--nodes", nodes, "--json"]).json()["predictions"]
    found = row["efficiency"]
    assert row["workers"] == point.workers and "nothing measured" in row["marks"]
    if point.bound == "above":
        assert found["high"] > point.efficiency and found["mean"] >= 0.9 * point.efficiency, found
    else:
        assert found["low"] <= point.efficiency <= found["high"], found
        assert row["limited_by"] == "server"


def test_a_guess_names_its_operations_in_plain_numbers(ask_hpcdl: CommandLine) -> None:
    line = ["predict", "--model", "resnet50", "--machine", "cori-knl", "--network", "aries", "--nodes", "2", "--json"]
    assert "3,860 million MACs" in ask_hpcdl(line).out


WEAK: Mapping[str, tuple[float, ...]] = {
    "googlenet": (1533, 1590, 1608, 1641, 1630, 1662, 1674),
    "vgg19": (1318, 1440, 1482, 1524, 1634, 1679, 1642),
}
"""Seconds of SC17's weak scaling on 1, 2, 4, ..., 64 KNL nodes: recalled, not confirmed, except the final 0.915."""


@pytest.mark.parametrize("model", WEAK)
@pytest.mark.parametrize("known", sampled([5, 4]))
def test_sc17_s_weak_scaling_from_its_smaller_sizes(model: str, known: int) -> None:
    runs = [
        make_run(1 << power, (1 << power) * 64 / (seconds / 300), model=model, strategy="sync-easgd", batch_per_rank=64)
        for power, seconds in enumerate(WEAK[model][:known])
    ]
    found = answer(Question(nodes=(64,), strategies=("sync-easgd",), network="aries"), runs).predictions[0]
    assert near(found.efficiency, WEAK[model][0] / WEAK[model][-1]), found.efficiency


DEEPBENCH = {
    400_000: (0.09, 0.14, 0.22, 0.26),
    12_390_400: (1.33, 1.85, 2.26, 3.23),
    16_777_216: (1.63, 2.31, 2.74, 4.19),
    67_108_864: (5.40, 7.54, 8.66, 14.72),
    258_000_000: (37.66, 47.45, 54.73, 66.11),
}
"""Milliseconds of an all-reduce on 2, 4, 8 and 16 KNL nodes with Omni-Path."""


def deepbench_run(num_bytes: int, ranks: int, milliseconds: float) -> Run:
    """Return a run with almost no computing: its step is the all-reduce."""
    return make_run(
        ranks, ranks / (1e-3 * milliseconds + 1e-5), model=f"sum-{num_bytes}", strategy="mpi", batch_per_rank=1,
        gradient_bytes=num_bytes, global_batch=ranks,
    )  # fmt: skip


def test_a_third_size_does_not_make_intervals_miss() -> None:
    """Measured on 2, 4 and 8 nodes, the intervals for 16 are wide enough, although the curves bend there.

    Of five 90 % intervals one may miss, by little: at 64 MiB the step grows by 70 % from 8 to 16 nodes.
    """
    beyond = []
    for num_bytes, times in DEEPBENCH.items():
        runs = [deepbench_run(num_bytes, 2 << place, times[place]) for place in range(3)]
        found = answer(Question(nodes=(16,), strategies=("mpi",)), runs).predictions[0].step_seconds
        beyond.append(max(found.low / (1e-3 * times[3]), 1e-3 * times[3] / found.high))
    *others, worst = sorted(beyond)
    assert max(others) <= 1 and worst <= 1.05, beyond


@pytest.mark.parametrize("num_bytes", sampled(DEEPBENCH))
def test_a_measured_all_reduce_from_a_quarter_of_its_nodes(num_bytes: int) -> None:
    """The interval allows for a change of the library's algorithm between the measured and predicted sizes."""
    times = DEEPBENCH[num_bytes]
    runs = [deepbench_run(num_bytes, 2 << place, times[place]) for place in range(2)]
    found = answer(Question(nodes=(16,), strategies=("mpi",), network="omni-path"), runs).predictions[0]
    assert near(found.step_seconds, 1e-3 * times[3]), (found.step_seconds, times[3])


STRONG = {"cifar10-quick": 0.5, "googlenet": 0.5, "caffenet": 0.3, "alexnet": 0.3}


@pytest.mark.parametrize("model", sampled(STRONG))
def test_stampede2_s_strong_curve_from_two_nodes(model: str) -> None:
    """Only the end of each curve is published; Amdahl's law through it gives the times of one and two nodes."""
    serial = (1 / STRONG[model] - 1) / 7
    runs = [
        make_run(n, 256 / (2.0 * (1 / n + serial * (n - 1) / n)), model=model, strategy="mpi", mode="strong",
                 batch_per_rank=256 // n, global_batch=256)
        for n in (1, 2) for _ in range(3)
    ]  # fmt: skip
    found = answer(Question(nodes=(8,), strategies=("mpi",), network="omni-path"), runs).predictions[0]
    assert near(found.efficiency, STRONG[model]), found.efficiency


@pytest.mark.parametrize("model", sampled(STRONG))
def test_stampede2_s_weak_curve_stays_near_80_percent(model: str) -> None:
    """Efficiency is about 80 % at 512 nodes; a line in log(nodes) gives the values up to 128 nodes."""
    runs = [
        make_run(n, n * 256 * (1 - 0.2 * power / 9), model=model, strategy="mpi", batch_per_rank=256)
        for power, n in enumerate((1, 2, 4, 8, 16, 32, 64, 128))
    ]
    found = answer(Question(nodes=(512,), strategies=("mpi",), network="omni-path"), runs).predictions[0]
    assert near(found.efficiency, 0.8), found.efficiency


def test_bnl_one_server_scales_badly_and_alexnet_worst() -> None:
    """As published in words: a ring is near-linear for three networks on GPUs, one server is bad, AlexNet worst."""
    servers, rings = {}, {}
    for model, macs in (("alexnet", 1.135e9), ("googlenet", 1.583e9), ("resnet50", 3.858e9)):
        evidence = dataclasses.replace(knl_node(model, 256, macs, 3e12), layouts={})
        forecast = Forecast(evidence, read_network("fdr-infiniband"), ["ring", "ps"])
        rings[model] = forecast.predict(evidence.at("ring", 16, 16, 0)).efficiency.mean
        servers[model] = forecast.predict(evidence.at("ps", 17, 16, 1)).efficiency.mean
    assert min(rings.values()) > 0.7 and rings["resnet50"] > 0.85
    assert servers["alexnet"] == min(servers.values()) and servers["alexnet"] < 0.6 < rings["alexnet"]


def test_theta_stragglers_are_hidden_only_in_part() -> None:
    """Pipelining cannot hide the slowest worker: its share grows with workers, and halving the noise helps most."""
    evidence = knl_node("resnet50", 32, 3.858e9)
    evidence = dataclasses.replace(evidence, stated={**evidence.stated, "noise": (0.1, 0.1)}, layouts={})
    forecast = Forecast(evidence, read_network("aries"), ["ring"])
    found = [forecast.predict(evidence.at("ring", n, n, 0)) for n in (4, 32, 256)]
    shares = [item.losses["compute noise"] for item in found]
    assert shares == sorted(shares) and shares[0] > 0.03
    assert all(item.limited_by == "compute noise" for item in found)
    assert max(found[-1].faster, key=lambda part: found[-1].faster[part] if part != "node" else 0) == "compute noise"


def test_an_all_reduce_alone_costs_what_the_literature_says() -> None:
    """An all-reduce costs what the literature says. Ring: 2(p-1) alpha + 2n(p-1)/p beta + n(p-1)/p gamma."""
    import numpy

    job = StepJob(strategy="ring", model="", nodes=8, workers=8, batch=1, lengths=(1 << 20,))
    values = {"latency_s": 1e-5, "byte_s": 1e-9, "memory_latency_s": 0, "memory_byte_s": 0, "sum_byte_s": 1e-10,
              "noise": 0.0, "contention": 0.0}  # fmt: skip
    found = exchange_seconds(job, {name: numpy.array([value]) for name, value in values.items()}, Network(name="x"))
    n = 4 << 20
    assert found[0] == pytest.approx(14e-5 + 2 * n * 7 / 8 * 1e-9 + n * 7 / 8 * 1e-10)
    assert sum(lengths_of("alexnet", None)) == 62_378_344

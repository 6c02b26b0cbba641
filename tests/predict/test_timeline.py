"""The simulated step agrees with clusters simulated worker by worker, and obeys known laws."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy
import pytest

from hpcdl.predict.calibration import natural_values, priors
from hpcdl.predict.jobs import StepJob, kind_of, lengths_of
from hpcdl.predict.network import UNKNOWN, read_network
from hpcdl.predict.timeline import simulate, slowest_of
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import patience
from tests.predict.clusters import STRATEGIES as PLAYED
from tests.predict.clusters import make_cluster, true_step


def job_of(strategy: str, workers: int, model: str = "resnet50", batch: float = 32, **changes: Any) -> StepJob:
    asked = changes.pop("servers", 1)
    servers = asked if STRATEGIES[strategy].features.servers else 0
    return StepJob(
        strategy=strategy, model=model, nodes=workers + servers, workers=workers, servers=servers, batch=batch,
        lengths=lengths_of(model, None), **changes,
    )  # fmt: skip


def usual(sets: int = 1) -> dict[str, Any]:
    items = priors((), read_network("omni-path"), {"image_s": (0.02, 0.1)})
    centers = numpy.array([[item.center for item in items]])
    spread = numpy.array([0.3 * item.spread for item in items])
    noise = numpy.random.default_rng(0).standard_normal((sets, len(items))) if sets > 1 else 0.0
    return natural_values(items, centers + spread * noise)


@pytest.mark.parametrize("strategy", PLAYED)
@pytest.mark.parametrize("seed", [3, 8, 24, 27, 38])
def test_with_the_truth_known_the_timeline_is_what_workers_do(strategy: str, seed: int) -> None:
    cluster = dataclasses.replace(make_cluster(seed), nodes=0.0, common=0.0, runs=0.0)
    known = {
        "image_s": cluster.image_s, "batch_overhead": 0.0, "update_s": cluster.update_s, "input_s": 0.0,
        "latency_s": cluster.latency_s, "byte_s": cluster.byte_s, "memory_latency_s": 0.0, "memory_byte_s": 0.0,
        "sum_byte_s": cluster.sum_byte_s, "overlap": cluster.hidden, "early": 1.0, "noise": cluster.noise,
        "contention": cluster.contention, "server_factor": cluster.server, "server_latency_s": 0.0,
        "grpc_byte_s": 0.0, "thread_power": 1.0, "file_system_images_s": 1e12,
    }  # fmt: skip
    values = {name: numpy.array([value]) for name, value in known.items()}
    for workers in (2, 4, 8, 32):
        job = job_of(strategy, workers, cluster.model, cluster.batch, servers=cluster.num_servers)
        found = float(simulate(job, values, UNKNOWN).seconds[0])
        true = sum(true_step(cluster, strategy, workers, 1).values())
        assert found == pytest.approx(true, rel=0.06), workers


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_timeline(strategy: str) -> None:
    values = usual(20)
    alone = simulate(job_of("single", 1), values, UNKNOWN)
    for workers in (1, 2, 5, 64) if strategy != "single" else (1,):
        job = job_of(strategy, workers)
        found = simulate(job, values, UNKNOWN)
        assert kind_of(strategy) and found.seconds.shape == (20,)
        assert numpy.isfinite(found.seconds).all()
        assert (found.seconds >= alone.seconds * (1 - 1e-9)).all(), "others cannot make a worker faster"
        assert found.seconds == pytest.approx(found.compute + sum(found.losses.values()))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *((name, 4096) for name in ("ring", "halving-doubling", "ps", "async-easgd", "easgd", "sync-easgd", "auto")),
        *((name, 1 << 20) for name in ("ps", "async-easgd", "easgd")),
    ],
)
def test_many_ranks_take_seconds(strategy: str, ranks: int) -> None:
    began = time.process_time()
    simulate(job_of(strategy, ranks, servers=64), usual(400), read_network("omni-path"))
    assert time.process_time() - began < patience(5)


def test_the_largest_of_n_is_what_draws_say() -> None:
    noise = 0.2
    drawn = numpy.random.default_rng(1)
    spread = numpy.sqrt(numpy.log1p(noise**2))
    for count in (2, 16, 300):
        largest = numpy.exp(spread * drawn.standard_normal((4000, count)) - spread**2 / 2).max(axis=1).mean()
        assert slowest_of(count, numpy.array([noise])).mean() == pytest.approx(largest, rel=0.02)


def test_periods_and_variants_cost_what_they_should() -> None:
    values = usual()

    def seconds(strategy: str, **changes: Any) -> float:
        return float(simulate(job_of(strategy, 16, "alexnet", 1, **changes), values, UNKNOWN).seconds[0])

    assert seconds("sync-easgd", variant="1") > seconds("sync-easgd", variant="2") > seconds("sync-easgd", variant="3")
    assert seconds("sync-easgd", variant="2", period=8) < seconds("sync-easgd", variant="2")
    assert seconds("easgd") > 5 * seconds("sync-easgd"), "P messages one after the other, not lg P"
    assert seconds("async-easgd", servers=8) < seconds("async-easgd", servers=1)
    assert seconds("async-easgd", period=16) < seconds("async-easgd") / 8


def exposed(job: StepJob) -> float:
    """Return the seconds of a step for messages that nothing hides."""
    losses = simulate(job, usual(), UNKNOWN).losses
    return float(sum(losses[name][0] for name in ("latency", "link", "memory", "summing")))


def test_fragments_hide_behind_steps_and_a_node_s_means_cost_memory() -> None:
    whole = job_of("diloco", 8, period=16)
    split = job_of("streaming-diloco", 8, period=16, fragments=1)
    assert exposed(split) == pytest.approx(exposed(whole))
    in_turn = dataclasses.replace(split, fragments=4)
    assert exposed(in_turn) >= exposed(whole) * 0.999
    beside = dataclasses.replace(in_turn, overlap=4)
    assert exposed(beside) < exposed(in_turn)
    nodes = dataclasses.replace(job_of("local-sgd", 8, period=16), nodes=2, workers_per_node=4)
    both = dataclasses.replace(nodes, period_within=2)
    assert exposed(nodes) < exposed(both) < exposed(dataclasses.replace(nodes, period=2))


def test_a_server_s_true_bytes_count() -> None:
    """A server's true bytes count: ResNet-50 unsplit on 64 servers puts 5.9 times the mean on the busiest."""
    values = usual()
    jobs = {name: job_of("ps", 512, servers=64, placement=name) for name in ("split", "greedy", "round-robin")}
    times = {name: float(simulate(job, values, UNKNOWN).losses["server"][0]) for name, job in jobs.items()}
    assert times["greedy"] > 3 * times["split"] and times["round-robin"] > 3 * times["split"]


def test_many_servers_are_no_faster_than_a_worker_s_own_link() -> None:
    """Many servers are not faster than a worker's link: two workers of eight servers send and receive all gradients."""
    values = usual() | dict.fromkeys(("server_latency_s", "noise", "contention"), numpy.zeros(1))
    job = job_of("ps", 2, "lenet", servers=8)
    both_ways = 2 * job.num_bytes * float(values["byte_s"][0])
    assert float(simulate(job, values, UNKNOWN).losses["server"][0]) == pytest.approx(both_ways, rel=0.01)


def test_switches_and_file_systems_slow_large_jobs_down() -> None:
    omni = read_network("omni-path")
    values = usual()
    assert omni.oversubscription(28) == 1 and 1.3 < omni.oversubscription(512) <= 1.4
    job = job_of("halving-doubling", 512, "alexnet", 1)
    near, far = (simulate(job, values, network).losses["link"][0] for network in (UNKNOWN, omni))
    assert far > 1.2 * near
    slow = values | {"file_system_images_s": numpy.array([1000.0])}
    assert simulate(job, slow, omni).seconds[0] == pytest.approx(0.512, rel=1e-6)

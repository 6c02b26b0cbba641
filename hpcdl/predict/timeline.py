"""The timeline of one step: a small discrete-event simulation, for many sets of parameters at once.

Events are gradients that become ready, bucket by bucket, on the slowest of n workers; all-reduces that begin when their
gradients are ready and the previous one is over; requests that queue at servers. Arrays are (parameter sets, steps):
the steps represent the distribution of workers' times at evenly spaced probabilities, so that nothing is random.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.predict.jobs import StepJob, kind_of
from hpcdl.predict.messages import Messages, allreduce_messages, buckets_of, coded_messages, server_loads
from hpcdl.predict.network import Network
from hpcdl.strategies.elastic.methods import METHODS

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

Parameters = Mapping[str, "Array"]
"""Values by name (calibration.py), with shape (parameter sets,) each."""

NUM_STEPS = 16
BACKWARD_SHARE = 2 / 3
"""Back-propagation takes two thirds of computing: twice the forward pass."""
MESSAGE_BYTES = 2 << 20
"""A server takes two messages of 1 MiB from each worker at once, and sums and sends them while others arrive."""
GRID = 24
"""Maximum number of workers whose arrivals at a server are simulated. If there are more, these represent all."""
QUEUE_ROUNDS = 10
MOST_QUEUED = 4096
"""Workers that a simulated queue has at most."""
QUEUE_EVENTS = 60_000  # sets of parameters times workers that are simulated; further sets are interpolated


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Mean seconds of a step and of computing, and the losses that make up the rest, (parameter sets,) each."""

    seconds: Array
    compute: Array
    losses: Mapping[str, Array]


def simulate(job: StepJob, parameters: Parameters, network: Network) -> StepTime:
    """Return the step of `job` for each set of parameters."""
    compute = compute_seconds(job, parameters)
    timeline = _TIMELINES["single" if job.alone else kind_of(job.strategy)]
    losses = {**timeline(job, parameters, network, compute)}
    if job.coded:
        losses["coding"] = coding_seconds(job, parameters) / job.period
    losses["update"] = parameters["update_s"] + 0 * compute
    losses["input"] = parameters["input_s"] + 0 * compute
    seconds = compute + _sum(losses.values())
    files = job.workers * job.batch / parameters["file_system_images_s"]
    losses["file system"] = numpy.maximum(0.0, files - seconds)
    return StepTime(seconds=seconds + losses["file system"], compute=compute, losses=losses)


def compute_seconds(job: StepJob, parameters: Parameters) -> Array:
    """Return the mean seconds of computing of one worker."""
    seconds: Array = parameters["image_s"] * (job.batch + parameters["batch_overhead"])
    if job.threads:
        seconds = seconds * job.threads ** -parameters["thread_power"]
    return seconds


def coding_seconds(job: StepJob, parameters: Parameters) -> Array:
    """Return a worker's seconds to pack and unpack all gradients once. Nothing hides them: they need the processor."""
    result: Array = parameters[f"coding {job.compress}"] * sum(job.lengths)
    return result


def exchange_seconds(job: StepJob, parameters: Parameters, network: Network) -> Array:
    """Return the seconds of one all-reduce of all gradients at once, with nothing beside it."""
    times = _by_cause(_unit_seconds(job, parameters) * _whole_messages(job.strategy, job, network))
    result: Array = numpy.maximum(_sum(times.values()), 1e-9)
    return result


def _mean(steps: Array) -> Array:
    """Return the mean over the steps, or workers, of each set; `mean` itself takes longer for so few values."""
    result: Array = numpy.add.reduce(steps, axis=1) / steps.shape[1]
    return result


def _sum(arrays: Iterable[Array]) -> Array:
    result: Array = functools.reduce(numpy.add, arrays)
    return result


def slowest_of(num: int, noise: Array) -> Array:
    """Return the largest of `num` lognormal factors of mean 1 and coefficient of variation `noise`: (sets, steps).

    The quantile of the largest of n at probability u is that of one at u^(1/n).
    """
    of_one, of_largest = _factors(noise, _deviations(num))
    # A few evenly spaced probabilities cut off the tail: the division keeps the mean at 1.
    result: Array = of_largest / _mean(of_one)[:, None]
    return result


@functools.lru_cache(maxsize=1024)
def _deviations(num: int) -> Array:
    """Return one standard normal deviation and the largest of `num`, at evenly spaced probabilities: (2, 1, steps)."""
    from scipy.special import ndtri

    chances = (numpy.arange(NUM_STEPS) + 0.5) / NUM_STEPS
    return numpy.array([[ndtri(chances)], [ndtri(chances ** (1 / num))]])


def in_order(num: int, noise: Array) -> tuple[Array, Array]:
    """Return factors of at most GRID workers, fastest first, and the number of workers from each on to the slowest.

    Their shapes are (sets, grid) and (grid,).
    """
    deviations, behind = _grid(num)
    return _factors(noise, deviations), behind


@functools.lru_cache(maxsize=1024)
def _grid(num: int) -> tuple[Array, Array]:
    from scipy.special import ndtri

    size = min(num, GRID)
    before = numpy.floor(numpy.arange(size) * num / size)
    return ndtri((before + 0.5) / num), num - before


def _factors(noise: Array, deviations: Array) -> Array:
    spread = numpy.sqrt(numpy.log1p(noise**2))[:, None]
    # The subtraction makes 1 the mean of the factors, not their median.
    result: Array = numpy.exp(spread * deviations - spread**2 / 2)
    return result


Losses = dict[str, "Array"]


def _single(job: StepJob, p: Parameters, network: Network, compute: Array) -> Losses:
    return {}


def _allreduce(job: StepJob, p: Parameters, network: Network, compute: Array) -> Losses:
    """Simulate buckets that leave one after another during back-propagation. The exchange ends with the last one."""
    slowest = compute[:, None] * slowest_of(job.workers, p["noise"])
    messages = _bucket_messages(job, network)
    unit = _unit_seconds(job, p)
    times = unit @ messages.T
    end = numpy.zeros_like(slowest)
    readiness = _readiness(job, buckets_of(job), p)
    for number in range(len(messages)):
        ready = slowest * readiness[number]
        end = numpy.maximum(end, ready) + times[:, number, None]
    # However early gradients leave, computing hides only the share `overlap` of an exchange.
    exposed = numpy.maximum(_mean(end - slowest), (1 - p["overlap"]) * times.sum(axis=1))
    whole = _by_cause(unit * messages.sum(axis=0))
    return {"compute noise": _mean(slowest) - compute, **_shares(exposed, whole)}


@functools.lru_cache(maxsize=4096)
def _bucket_messages(job: StepJob, network: Network) -> Array:
    """Return rounds and bytes between nodes, rounds and bytes in memory, and summed bytes per bucket: (buckets, 5)."""
    sizes = buckets_of(job)
    if job.coded:
        messages = [coded_messages(job, size / sum(sizes), network) for size in sizes]
    else:
        messages = [allreduce_messages(job.strategy, job, size, network) for size in sizes]
    return numpy.array([_amounts(message) for message in messages])


@functools.lru_cache(maxsize=4096)
def _whole_messages(strategy: str, job: StepJob, network: Network) -> Array:
    """Return the same for all gradients at once by `strategy`: (5,)."""
    return numpy.array(_amounts(allreduce_messages(strategy, job, job.num_bytes, network)))


def _amounts(messages: Messages) -> tuple[float, ...]:
    return (messages.rounds, messages.bytes, messages.memory_rounds, messages.memory_bytes, messages.summed)


def _unit_seconds(job: StepJob, p: Parameters) -> Array:
    """Return the seconds of one unit of each of these amounts: (sets, 5)."""
    efficacy = numpy.exp(p.get(f"efficacy {job.label}", 0.0 * p["noise"]))
    costs = (
        p["latency_s"],
        p["byte_s"] * _contention(job, p),
        p["memory_latency_s"],
        p["memory_byte_s"],
        p["sum_byte_s"],
    )
    return (numpy.array(costs) * efficacy).T.copy()


def _by_cause(seconds: Array) -> Losses:
    """Return such seconds by their cause."""
    in_memory = seconds[:, 2] + seconds[:, 3]
    return {"latency": seconds[:, 0], "link": seconds[:, 1], "memory": in_memory, "summing": seconds[:, 4]}


def _readiness(job: StepJob, sizes: Sequence[float], p: Parameters) -> list[Array]:
    """Return when each bucket of `sizes` bytes has its gradients, as a share of computing: (sets, 1) each.

    The times follow a trace, by bytes; without one they are even steps over back-propagation.
    """
    if job.ready:
        # When the forward pass ends, no gradient is ready yet.
        share, ready = zip((0.0, 1 - BACKWARD_SHARE), *job.ready, strict=True)
        done = numpy.cumsum(sizes) / sum(sizes)
        return [numpy.full((len(p["early"]), 1), ready_share) for ready_share in numpy.interp(done, share, ready)]
    left = [1 - (number + 1) / len(sizes) for number in range(len(sizes))]
    return [1 - BACKWARD_SHARE * p["early"][:, None] * left_share for left_share in left]


def _contention(job: StepJob, p: Parameters) -> Array:
    """Return the factor by which bytes take longer if many nodes send at once: 1 for two."""
    result: Array = (max(job.nodes, 2) / 2) ** p["contention"]
    return result


def _shares(exposed: Array, whole: Losses) -> Losses:
    """Return exposed seconds, divided among causes as the whole exchange is."""
    total = _sum(whole.values())
    scale = exposed / numpy.maximum(total, 1e-30)
    return {name: seconds * scale for name, seconds in whole.items()}


def _servers(job: StepJob, p: Parameters, network: Network, compute: Array) -> Losses:
    """Simulate workers' buckets that queue at the busiest server, which sums pieces and sends the means back."""
    if job.strategy == "grpc-ps":
        return _grpc_servers(job, p, compute)
    slowest = compute[:, None] * slowest_of(job.workers, p["noise"])
    factors, behind = in_order(job.workers, p["noise"])
    crowd_of = _crowd(compute[:, None] * factors, behind, slowest)
    byte_s, latency_s = _port(job, p, network)
    link_s = p["memory_byte_s"] if job.local else p["byte_s"] * _contention(job, p)
    loads = server_loads(job)
    readiness = _readiness(job, [load.all_servers for load in loads], p)
    sent, came, gone = (numpy.zeros_like(slowest) for _ in range(3))
    for number, load in enumerate(loads):
        ready = readiness[number]
        served = load.busiest * byte_s + p["server_latency_s"]
        crowd = crowd_of(ready, served[:, None])
        own_link = (load.all_servers * link_s)[:, None]
        sent = numpy.maximum(sent, slowest * ready) + own_link
        # Three bounds: the queue of earlier buckets, workers that come at once, the slowest worker's link.
        came = numpy.maximum(numpy.maximum(came + job.workers * served[:, None], crowd), sent)
        # The last pieces of all servers' means reach a worker through its own link.
        piece = min(load.busiest, MESSAGE_BYTES) * byte_s
        own_pieces = min(load.all_servers, job.servers * MESSAGE_BYTES) * link_s
        passed = gone + numpy.maximum(job.workers * served[:, None], own_link)
        gone = numpy.maximum(came + numpy.maximum(job.workers * piece, own_pieces)[:, None], passed)
    efficacy = numpy.exp(p.get(f"efficacy {job.label}", 0.0 * p["noise"]))
    exposed = efficacy * _mean(gone - slowest) + 2 * latency_s
    return {
        "compute noise": _mean(slowest) - compute,
        "server": exposed - 2 * latency_s,
        "latency": 2 * latency_s,
    }


def _crowd(arrivals: Array, behind: Array, slowest: Array) -> Callable[[Array, Array], Array]:
    """Return a function for when a server finishes a bucket if its workers come at once: the latest of their bounds.

    `arrivals` (sets, grid) ascend; none counts later than the slowest worker's (sets, steps). `behind` (grid,) workers
    come with or after each. Those before the slowest are the same in all steps; of the others the first has most behind
    it. The function takes the share of computing after which the bucket is ready and its seconds of service, (sets, 1).
    """
    before = (arrivals[:, :, None] <= slowest[:, None, :]).sum(axis=1)
    late = numpy.append(behind, 0.0)[before]
    early = numpy.zeros((len(arrivals), arrivals.shape[1] + 1))  # no worker is before the first
    positions = before + numpy.arange(len(arrivals))[:, None] * early.shape[1]

    def crowd(ready: Array, served: Array) -> Array:
        numpy.maximum.accumulate(arrivals * ready + behind * served, axis=1, out=early[:, 1:])
        result: Array = numpy.maximum(early.take(positions), slowest * ready + late * served)
        return result

    return crowd


def _port(job: StepJob, p: Parameters, network: Network) -> tuple[Array, Array]:
    """Return seconds per byte at the busiest server's port, which others may share, and a message's latency."""
    if job.local:
        return p["memory_byte_s"] * p["server_factor"], p["memory_latency_s"]
    per_node = -(-job.servers // job.server_nodes) if job.server_nodes else -(-job.servers // job.nodes)
    crowding = float(per_node)
    if not job.server_nodes:  # the workers of its node send and receive through the same port
        crowding += job.workers_per_node * job.servers / max(1, job.workers)
    far = network.oversubscription(job.nodes)
    return p["byte_s"] * p["server_factor"] * crowding * far * _contention(job, p), p["latency_s"]


def _grpc_servers(job: StepJob, p: Parameters, compute: Array) -> Losses:
    """Simulate TensorFlow, which sends variables as they come and fetches them when needed, beside the whole step."""
    slowest = _mean(compute[:, None] * slowest_of(job.workers, p["noise"]))
    busiest = sum(load.busiest for load in server_loads(job))
    efficacy = numpy.exp(p.get(f"efficacy {job.label}", 0.0 * p["noise"]))
    served = efficacy * job.workers * busiest * p["grpc_byte_s"]
    return {
        "compute noise": slowest - compute,
        "server": numpy.maximum(0.0, served - slowest),
        "latency": 2 * p["latency_s"],
    }


def _center(job: StepJob, p: Parameters, network: Network, compute: Array) -> Losses:
    """Simulate exchanges with a center every `period` steps: in rank order, in order of arrival, or without a lock."""
    method = METHODS[job.strategy]
    between = job.period * compute
    efficacy = numpy.exp(p.get(f"efficacy {job.label}", 0.0 * p["noise"]))
    if method.lock_free:
        port = p["memory_byte_s"] if job.local else p["byte_s"] * _contention(job, p)
        served = efficacy * 2 * job.num_bytes * port
        cycle = numpy.maximum(between, served) if method.overlapped else between + served
    else:
        byte_s, latency_s = _port(job, p, network)
        per_byte = 2 * byte_s + p["sum_byte_s"]
        served = efficacy * (job.num_bytes / job.servers * per_byte + p["server_latency_s"] + 2 * latency_s)
        # The sum of independent steps varies less, relative to its mean, than one of them.
        noise = p["noise"] / numpy.sqrt(job.period)
        ideal = numpy.maximum(between, served) if method.overlapped else between + served
        queue = _Queue(job.workers, in_order=method.in_rank_order, overlapped=method.overlapped)
        cycle = numpy.maximum(ideal, job.workers * served) * queue.stretch(between, served, noise)
    return {"link" if method.lock_free else "server": (cycle - between) / job.period}


class _Queue:
    """Discrete events of workers that compute, request, wait and continue, until the queue is in a steady state."""

    def __init__(self, workers: int, *, in_order: bool, overlapped: bool) -> None:
        # Thousands of workers leave chance no part: fewer with longer services load the server alike.
        self._workers, self._service_scale = min(workers, MOST_QUEUED), max(1.0, workers / MOST_QUEUED)
        self._in_order, self._overlapped = in_order, overlapped

    def stretch(self, between: Array, served: Array, noise: Array) -> Array:
        """Return a worker's cycle relative to its bound, for each set: simulated for some, interpolated for others."""
        served = self._service_scale * served
        load = self._workers * served / (between + served)
        size = min(len(load), max(4, QUEUE_EVENTS // self._workers))
        # `interp` below needs ascending loads.
        chosen = numpy.argsort(load)[numpy.linspace(0, len(load) - 1, size).round().astype(int)]
        cycles = self._cycles(between[chosen], served[chosen], noise[chosen])
        ideal = between + served if not self._overlapped else numpy.maximum(between, served)
        bound = numpy.maximum(ideal, self._workers * served)[chosen]
        result: Array = numpy.interp(load, load[chosen], numpy.maximum(1.0, cycles / bound))
        return result

    def _cycles(self, between: Array, served: Array, noise: Array) -> Array:
        shape = (len(between), self._workers)
        shares, deviations = _chances(self._workers)
        arrived = between[:, None] * shares
        free: Array = numpy.zeros(len(between))
        computing = between[:, None] * _factors(noise, deviations)
        rows = (numpy.arange(shape[0]) * shape[1])[:, None]
        positions = numpy.arange(shape[1]) * served[:, None]
        # The first half of the rounds fills the queue; only the others count.
        half = QUEUE_ROUNDS // 2
        for number in range(QUEUE_ROUNDS):
            if number == half:
                settled = _mean(arrived)
            order = None if self._in_order else arrived.argsort(axis=1) + rows
            times: Array = arrived if order is None else arrived.ravel()[order]
            # A service begins at max(arrival, previous begin + served); without i x served that is a running maximum.
            begins = numpy.maximum.accumulate(numpy.maximum(times, free[:, None]) - positions, axis=1) + positions
            done: Array = begins + served[:, None]
            free, ends = done[:, -1], done
            if order is not None:
                ends = numpy.empty(shape)
                ends.ravel()[order] = done
            # With overlap a worker requests the next exchange at once, and continues when both are over.
            arrived = numpy.maximum(arrived + computing[number], ends) if self._overlapped else ends + computing[number]
        cycles: Array = (_mean(arrived) - settled) / (QUEUE_ROUNDS - half)
        return cycles


@functools.lru_cache(maxsize=24)
def _chances(workers: int) -> tuple[Array, Array]:
    """When workers first ask, (1, workers), and deviations for each round of them, (rounds, 1, workers).

    The same for every set: differences between sets, by which unknowns are fitted, are theirs alone.
    """
    random = numpy.random.default_rng(0)
    shares = random.random((1, workers))
    deviations = random.standard_normal((QUEUE_ROUNDS, 1, workers))
    # A mean of 0 over the rounds that count: the draws themselves must not make workers slower.
    return shares, deviations - deviations[QUEUE_ROUNDS // 2 :].mean()


def _sync_easgd(job: StepJob, p: Parameters, network: Network, compute: Array) -> Losses:
    """Simulate exchanges of all workers at once every `period` steps; in variant 3 they overlap computing."""
    factors = slowest_of(job.workers, p["noise"] / numpy.sqrt(job.period))
    slowest = _mean(compute[:, None] * factors)
    whole = _by_cause(_unit_seconds(job, p) * _whole_messages(_EASGD_SUMS[job.variant], job, network))
    total = _sum(whole.values())
    hidden = numpy.minimum(p["overlap"] * total, slowest) if job.variant == "3" else 0.0 * total
    return {
        "compute noise": slowest - compute,
        **_shares((total - hidden) / job.period, whole),
    }


def _periodic(job: StepJob, p: Parameters, network: Network, compute: Array) -> Losses:
    """Simulate an all-reduce of all weights every `period` steps without overlap, or of each fragment beside steps."""
    alone = job.period_within or job.period / job.fragments  # steps without waiting for other workers
    factors = slowest_of(job.workers, p["noise"] / numpy.sqrt(alone))
    slowest = _mean(compute[:, None] * factors)
    whole = _by_cause(_unit_seconds(job, p) * _fragment_messages(job, network))
    exchange_s = _sum(whole.values())
    exposed = exchange_s - numpy.minimum(p["overlap"] * exchange_s, job.overlap * slowest)
    losses = {"compute noise": slowest - compute, **_shares(exposed * job.fragments / job.period, whole)}
    if not job.period_within:
        return losses
    node = dataclasses.replace(job, nodes=1, workers=min(job.workers, job.workers_per_node))
    inside = _by_cause(_unit_seconds(node, p) * _whole_messages("auto", node, network))
    # In every `period`-th step the exchange of all workers takes this one's place.
    share = 1 / job.period_within - 1 / job.period
    return losses | {name: losses[name] + share * seconds for name, seconds in inside.items()}


@functools.lru_cache(maxsize=4096)
def _fragment_messages(job: StepJob, network: Network) -> Array:
    """Return `_whole_messages` for one of the fragments in which all weights are exchanged."""
    if job.coded:
        return numpy.array(_amounts(coded_messages(job, 1 / job.fragments, network)))
    return numpy.array(_amounts(allreduce_messages("auto", job, job.num_bytes // job.fragments, network)))


_EASGD_SUMS = {"1": "tree", "2": "auto", "3": "auto"}
_TIMELINES: Mapping[str, Callable[[StepJob, Parameters, Network, Array], Losses]] = {
    "single": _single,
    "all-reduce": _allreduce,
    "servers": _servers,
    "center": _center,
    "sync-easgd": _sync_easgd,
    "periodic": _periodic,
}

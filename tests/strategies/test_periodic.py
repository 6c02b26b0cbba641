"""Local SGD, SlowMo and DiLoCo: the papers' equations, whole trainings on MPI ranks, resuming, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.comm import threads
from hpcdl.comm.observed import observe
from hpcdl.config.load import Layer, load
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig, StepBenchConfig, TrainConfig
from hpcdl.core.errors import BrokenGroup, CarriedError, NotFiniteError, UsageError
from hpcdl.run.plan import prepare, rule_in_force, with_own_period
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.periodic.methods import METHODS
from hpcdl.strategies.periodic.shared import SharedWeights
from hpcdl.strategies.periodic.streaming import StreamedWeights
from hpcdl.strategies.periodic.worker import PeriodChoosing, PeriodicWorker, period_for
from hpcdl.strategies.table import find_strategy
from tests.conftest import CommandLine
from tests.training_runs import PLANTED, SHORT, finish, model_weights, record_of, same_run, start, steps_done, wait_for

RATE = 0.05
WHOLE = [name for name, method in METHODS.items() if method.streaming is None]
"""The methods that exchange all weights at once."""
OUTER = {"local-sgd": (None, None), "slowmo": (0.9, 0.5), "diloco": (0.7, 0.9)}


def targets(worker: int, size: int) -> np.ndarray:
    return np.random.default_rng(worker).standard_normal(size).astype(np.float32)


def context_of(name: str, group: Any, num_steps: int = 0, epoch: int = 0, **elastic: Any) -> Context:
    return Context(
        info=find_strategy(name), communicator=group, num_workers=group.size, num_servers=0,
        exchange=ExchangeConfig(), optimizer=OptimizerConfig(), elastic=ElasticConfig(**elastic), num_steps=num_steps,
        steps_per_epoch=epoch,
    )  # fmt: skip


def shared_by_threads(
    name: str, workers: int, steps: int, period: int, size: int = 33, **more: Any
) -> list[np.ndarray]:
    """Return every worker's shared weights after gradient descent towards its own target, in float32."""
    rate, momentum = OUTER[name]

    def rank(inner: Any) -> np.ndarray:
        group = observe(inner)
        elastic = {"period": period, "outer_rate": rate, "outer_momentum": momentum, **more}
        shared = SharedWeights(context_of(name, group, steps, **elastic))
        shared.start(np.ones(size, np.float32))
        own = shared.weights.copy()
        for step in range(steps):
            exchanges = shared.before_step(step, RATE)
            own -= np.float32(RATE) * (own - targets(group.rank, size))
            if exchanges:
                own = shared.exchange(own).copy()
        return shared.weights

    return threads.run(workers, rank)


def by_the_paper(name: str, workers: int, steps: int, period: int, size: int = 33, dtype: Any = np.float64) -> Any:
    """Run the algorithm as it is printed, one worker after the other."""
    x, v = np.ones(size, dtype), np.zeros(size, dtype)
    alpha, beta = OUTER[name]
    gamma = RATE
    own = [x.copy() for _ in range(workers)]
    for step in range(steps):
        for worker in range(workers):
            own[worker] -= dtype(RATE) * (own[worker] - targets(worker, size).astype(dtype))
        if (step + 1) % period and step + 1 != steps:
            continue
        change = sum(x - one for one in own) / dtype(workers)
        if name == "local-sgd":
            x = x - change
        elif name == "slowmo":
            v = dtype(beta) * v + change / dtype(gamma)
            x = x - dtype(alpha * gamma) * v
        else:
            v = dtype(beta) * v + change
            x = x - dtype(alpha) * (change + dtype(beta) * v)
        own = [x.copy() for _ in range(workers)]
    return x


@pytest.mark.parametrize("name", WHOLE)
def test_two_workers_leave_the_bits_of_a_plain_program(name: str) -> None:
    for found in shared_by_threads(name, 2, steps=30, period=4):
        assert found.tobytes() == by_the_paper(name, 2, 30, 4, dtype=np.float32).tobytes()


@pytest.mark.parametrize("workers", [1, 3, 4, 8])
@pytest.mark.parametrize("name", WHOLE)
def test_any_number_of_workers_follows_the_paper(name: str, workers: int) -> None:
    ours = shared_by_threads(name, workers, steps=24, period=5)
    assert all(one.tobytes() == ours[0].tobytes() for one in ours)
    np.testing.assert_allclose(ours[0], by_the_paper(name, workers, 24, 5), rtol=2e-5, atol=2e-6)


NODES = ["a", "a", "b", "b"]


def by_node(name: str, steps: int, within: int, between: int, size: int = 33) -> tuple[Any, list[Any]]:
    """Return shared and own weights: four workers on two nodes, with means inside each node between the exchanges."""
    x, v = np.ones(size), np.zeros(size)
    own = [x.copy() for _ in NODES]
    for step in range(1, steps + 1):
        own = [one - RATE * (one - targets(worker, size)) for worker, one in enumerate(own)]
        if step % between == 0:
            change = x - np.mean(own, axis=0)
            rate, momentum = OUTER[name]
            if name == "local-sgd":
                x = x - change
            elif name == "slowmo":
                v = momentum * v + change / RATE
                x = x - rate * RATE * v
            else:
                v = momentum * v + change
                x = x - rate * (change + momentum * v)
            own = [x.copy() for _ in NODES]
        elif step % within == 0:
            means = {node: np.mean([one for one, at in zip(own, NODES, strict=True) if at == node], axis=0)
                     for node in NODES}  # fmt: skip
            own = [means[node] for node in NODES]
    return x, own


@pytest.mark.parametrize("name", WHOLE)
def test_workers_of_a_node_take_their_mean_in_between(name: str) -> None:
    rate, momentum = OUTER[name]

    def rank(inner: Any) -> tuple[np.ndarray, np.ndarray, int]:
        group = observe(inner)
        elastic = {"period": 6, "period_within": 2, "outer_rate": rate, "outer_momentum": momentum}
        shared = SharedWeights(context_of(name, group, 0, **elastic))
        shared.start(np.ones(33, np.float32))
        own = shared.weights.copy()
        for step in range(16):
            exchanges = shared.before_step(step, RATE)
            own -= np.float32(RATE) * (own - targets(group.rank, 33))
            if exchanges:
                own = shared.exchange(own).copy()
        return shared.weights, own, shared.num_nodes

    x, own = by_node(name, 16, 2, 6)
    found = threads.run(4, rank, NODES)
    for worker, (shared, mine, num_nodes) in enumerate(found):
        np.testing.assert_allclose(shared, x, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(mine, own[worker], rtol=2e-5, atol=2e-6)
        assert num_nodes == 2
    # After step 16 the two workers of a node have the same weights, the two nodes do not.
    assert found[0][1].tobytes() == found[1][1].tobytes() != found[2][1].tobytes()
    assert abs(own[0] - own[2]).max() > 0.01


def test_slow_momentum_with_a_constant_rate_is_bmuf() -> None:
    """Chen and Huo 2016: D_t = eta D_(t-1) + zeta G_t; W_t = W_(t-1) + D_t, G_t the change of the mean from W_(t-1)."""
    block_rate, block_momentum = OUTER["slowmo"]
    x, d = np.ones(33), np.zeros(33)
    for _ in range(6):
        own = [x.copy() for _ in range(2)]
        for worker, one in enumerate(own):
            for _ in range(4):
                one -= RATE * (one - targets(worker, 33))
        d = block_momentum * d + block_rate * (np.mean(own, axis=0) - x)
        x = x + d
    np.testing.assert_allclose(shared_by_threads("slowmo", 2, steps=24, period=4)[0], x, rtol=2e-5, atol=2e-6)


def test_post_local_sgd_exchanges_in_every_step_first() -> None:
    shared = SharedWeights(context_of("local-sgd", threads.alone(), 15, period=4, post_local_start=3))
    assert [step + 1 for step in range(15) if shared.before_step(step, RATE)] == [1, 2, 3, 4, 8, 12, 15]


def alone(own: float, worker: int, steps: int) -> float:
    """Gradient descent of one worker towards its number."""
    for _ in range(steps):
        own -= RATE * (own - worker)
    return own


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras's variables, under numpy 2
@pytest.mark.parametrize(("done", "breaks", "over"), [
    ((2, 0, 3), None, None),  # in the middle of a round
    ((4, 2, 4), 4, None),  # two were exchanging, and the exchange broke
    ((6, 4, 4), 4, 0),  # the exchange was over on worker 0 alone, which continued
])  # fmt: skip
def test_those_left_come_level_and_lose_no_step(done: tuple[int, ...], breaks: int | None, over: int | None) -> None:
    """Three of four workers survive after `done` steps; they level their steps and lose none.

    The exchange after step `breaks` fails, except on worker `over`, for which it had finished.
    """
    import keras

    levels, of_the_dead = threading.Barrier(3), 7.0

    def rank(inner: Any) -> tuple[float, int, float]:
        group = observe(inner)
        number, moved = group.rank, list[int]()
        worker = PeriodicWorker(context_of("local-sgd", group, period=4))
        variable, optimizer = keras.Variable(np.float32(0), name="w"), keras.optimizers.SGD(RATE)
        optimizer.build([variable])
        worker.start([variable])

        def average(buffer: Any, *_: Any) -> None:
            if number != over:
                raise BrokenGroup("rank 3 is dead", rank=3)
            buffer[:] = -of_the_dead  # as if rank 3 had still answered

        def take_steps(count: int) -> None:
            for _ in range(count):
                worker.before_step(len(moved))
                moved.append(len(moved))
                worker.apply([variable - float(number)], [variable], optimizer)

        kept, shared = worker._shared._average, worker._shared
        shared._average = average  # type: ignore[method-assign]
        try:
            take_steps(done[number])
        except CarriedError:
            assert breaks == done[number] and number != over
        shared._average = kept  # type: ignore[method-assign]
        levels.wait(60)
        worker.level(group, len(moved), take_steps)
        return float(variable), len(moved), float(worker.center()[0])  # type: ignore[index]

    found = threads.run(3, rank)
    assert {steps for _, steps, _ in found} == {max(done)}
    if breaks is None:
        expected = [alone(0.0, worker, max(done)) for worker in range(3)]
    elif over is None:
        expected = [float(np.mean([alone(0.0, worker, breaks) for worker in range(3)]))] * 3
    else:
        expected = [alone(of_the_dead, worker, max(done) - breaks) for worker in range(3)]
    center = 0.0 if breaks is None else of_the_dead if over is not None else expected[0]
    np.testing.assert_allclose([own for own, *_ in found], expected, rtol=1e-5)
    np.testing.assert_allclose([shared for *_, shared in found], center, rtol=1e-5)


@pytest.mark.parametrize("period", [1, 4])
def test_a_second_loss_before_any_step_finds_nothing_to_make_good(period: int) -> None:
    """A second loss, while steps are traced again after step 4, which may end a round, leaves no step to make good."""

    def rank(inner: Any) -> None:
        group = observe(inner)
        worker = PeriodicWorker(context_of("local-sgd", group, period=period))
        taken: list[int] = []
        worker.level(group, 4, taken.append)
        assert taken == [0]

    threads.run(3, rank)


def test_a_rate_of_zero_moves_nothing() -> None:
    """A learning rate of zero, as at the end of a cosine schedule, changes nothing, and nothing is divided by it."""
    shared = SharedWeights(context_of("slowmo", observe(threads.alone()), 0, period=1))
    shared.start(np.ones(5, np.float32))
    shared.before_step(0, 0.0)
    assert shared.exchange(np.ones(5, np.float32)).tolist() == [1.0] * 5


def test_weights_that_are_no_numbers_end_the_run_with_the_variable_named() -> None:
    shared = SharedWeights(context_of("diloco", observe(threads.alone()), 0, period=1))
    shared.start(np.ones(5, np.float32))
    shared.variables = [("a", 2), ("b", 3)]
    shared.before_step(7, 0.1)
    with pytest.raises(NotFiniteError, match="of b is not finite at step 7 on rank 0"):
        shared.exchange(np.array([1, 1, 1, np.nan, 1], np.float32))


def case(strategy: str, workers: int, optimizer: str, period: int, **more: Any) -> dict[str, Any]:
    found = {"strategy": strategy, "workers": workers, "optimizer": optimizer, "period": period, "steps": 11, **more}
    return found if strategy == "local-sgd" else {**found, "outer": OUTER[strategy]}


RANKS = [
    case("local-sgd", 2, "momentum", 1),
    case("local-sgd", 4, "sgd", 1),
    case("local-sgd", 2, "momentum", 4),
    case("local-sgd", 4, "sgd", 3, post_local_start=2),
    case("slowmo", 2, "momentum", 4, gamma=0.02),
    case("diloco", 2, "adamw", 4),
    case("slowmo", 4, "momentum", 6, gamma=0.02, period_within=2),
    case("diloco", 4, "adamw", 5),
    {**case("diloco", 4, "adamw", 5), "strategy": "streaming-diloco", "fragments": 1, "overlap": 0, "mixing": 1.0},
]


def run_ranks(script: str, cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return what a program of four ranks in this folder writes about each of the cases."""
    mpiexec = find_mpiexec()
    (folder / "cases.json").write_text(json.dumps(cases))
    path = Path(__file__).with_name(script)
    finished = subprocess.run(
        [str(mpiexec.path), "-n", "4", sys.executable, str(path), str(folder / "cases.json"), str(folder / "out")],
        env={**os.environ, **environment_for(mpiexec.flavour), "XDG_CACHE_HOME": str(folder)},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("periodic_ranks.py", RANKS, tmp_path_factory.mktemp("periodic"))


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize("number", range(len(RANKS)), ids=lambda number: f"{RANKS[number]['strategy']}-{number}")
def test_ranks_train_as_a_plain_keras_program_does(on_ranks: list[dict[str, Any]], number: int) -> None:
    """Shared weights and moving statistics equal a plain Keras program's; so does each worker's own optimizer state."""
    found = on_ranks[number]
    assert found["alike"]
    assert found["weights"] < 1e-4 and found["statistics"] < 1e-4 and found["optimizer"] < 1e-3, found


@pytest.mark.long
@pytest.mark.mpi
def test_one_fragment_without_overlap_is_diloco_bit_for_bit(on_ranks: list[dict[str, Any]]) -> None:
    whole, streamed = on_ranks[-2:]
    assert whole["digest"] == streamed["digest"]


STREAMING = [
    {"workers": workers, "period": 12, "fragments": 3, "overlap": 2, "mixing": 0.5, "steps": 41, "cuts": [5, 6, 17, 24]}
    for workers in (2, 4)
] + [
    {"workers": 4, "period": 10, "fragments": 4, "overlap": 2, "mixing": 1, "steps": 33},
    {"workers": 2, "period": 4, "fragments": 1, "overlap": 0, "mixing": 1, "steps": 11},
    {"workers": 4, "period": 4, "fragments": 1, "overlap": 0, "mixing": 1, "steps": 11},
    {"workers": 4, "period": 12, "fragments": 3, "overlap": 2, "mixing": 0.5, "steps": 41, "compress": "bf16"},
    {"workers": 4, "period": 12, "fragments": 3, "overlap": 2, "mixing": 0.5, "steps": 41, "compress": "fp16"},
    *(
        {
            "workers": workers,
            "period": 12,
            "fragments": 3,
            "overlap": 2,
            "mixing": mixing,
            "steps": 41,
            "compress": compress,
            "cuts": [5, 6, 17, 24],
        }
        for compress in ("int8", "fp4")
        for workers, mixing in ((2, 0.5), (4, 1))
    ),
]
OF_PLAIN = {"int8": (0.15, 0.3), "fp4": (0.1, 0.2)}
"""Bounds of the bytes relative to float32, statistics included."""


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run_ranks("streaming_ranks.py", STREAMING, tmp_path_factory.mktemp("streaming"))


@pytest.mark.mpi
@pytest.mark.parametrize("number", range(len(STREAMING)))
def test_fragments_leave_the_bits_of_the_papers_algorithm(streamed: list[Any], number: int) -> None:
    """Shared and own weights equal the paper's on every worker, also resumed with and without a pending fragment."""
    wanted = STREAMING[number]
    assert len(streamed[number]) == wanted["workers"]
    for found in streamed[number]:
        assert found["moved"] > 0.5
        if wanted.get("compress") in OF_PLAIN:
            least, most = OF_PLAIN[wanted["compress"]]
            assert found["counted"] == 0 and least < found["bytes"] < most, found
            assert 0 < found["to_plain"] < 0.2 * found["moved"], found
        elif "compress" in wanted:
            assert 0 < found["error"] < 0.01 and 0.4 < found["bytes"] < 0.7, found
            continue
        assert found["shared"] and found["own"], found
        assert all(found[f"cut {cut}"] for cut in wanted.get("cuts", []))
        assert found.get("diloco", True)
    if "cuts" in wanted:
        assert [streamed[number][0][f"under way {cut}"] for cut in wanted["cuts"]] == [True, False, True, True]
    assert ("diloco" in streamed[number][0]) == (wanted["fragments"] == 1)


def test_a_model_with_fewer_layers_than_fragments_is_refused() -> None:
    shared = StreamedWeights(context_of("streaming-diloco", observe(threads.alone()), period=8, fragments=3))
    shared.variables = [("a/kernel", 3), ("a/bias", 1), ("b/kernel", 1)]
    with pytest.raises(UsageError, match="--fragments 3: the model has 2 layers with weights; use at most"):
        shared.start(np.ones(5, np.float32))
    shared.close()


def test_by_itself_there_are_at_most_as_many_fragments_as_layers() -> None:
    shared = StreamedWeights(context_of("streaming-diloco", observe(threads.alone()), period=50))
    shared.variables = [("a/kernel", 3), ("a/bias", 1), ("b/kernel", 1)]
    shared.start(np.ones(5, np.float32))
    assert shared.details()["fragments"] == 2
    shared.close()


def train_line(strategy: str, data: Path, run_dir: Path, *more: Any) -> list[str]:
    line = [*SHORT, "--strategy", strategy, "--data", data, "--run-dir", run_dir, *more]
    return [str(word) for word in line]


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize("number", [number for number, found in enumerate(RANKS) if found["period"] == 1])
def test_an_exchange_in_every_step_is_synchronous_sgd(on_ranks: list[dict[str, Any]], number: int) -> None:
    """An exchange in every step equals synchronous SGD, with momentum too: its equation is linear, so means agree."""
    assert on_ranks[number]["synchronous"] <= 1e-5


@pytest.mark.long
@pytest.mark.mpi
def test_an_exchange_in_every_step_leaves_the_weights_of_ring(
    run_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    more = ["--optimizer", "sgd", "--steps", 20]
    assert run_hpcdl(train_line("ring", shards, tmp_path / "ring", *more)).code == 0
    assert run_hpcdl(train_line("local-sgd", shards, tmp_path / "local", *more, "--period", 1)).code == 0
    for ours, theirs in zip(model_weights(tmp_path / "local"), model_weights(tmp_path / "ring"), strict=True):
        assert abs(ours - theirs).max() <= 1e-5 * abs(theirs).max() + 1e-7


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize(
    "strategy",
    [name if name == "streaming-diloco" else pytest.param(name, marks=pytest.mark.soak) for name in METHODS],
)
def test_a_run_that_is_stopped_in_a_period_resumes_bit_for_bit(
    run_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """A run stopped within a period resumes own weights, optimizer, outer momentum and position, bit for bit.

    The last step exchanges. `make test-all` runs the method that keeps the most state: it has pending fragments too,
    in 4 bits.
    """
    more = ["--model", f"{PLANTED}:build", "--period", "13", "--steps", "60"]
    more += ["--optimizer", "adam", "--learning-rate", "0.001"]
    more += ["--fragments", "2", "--overlap", "4", "--compress", "fp4"] if METHODS[strategy].streaming else []
    whole = run_hpcdl(train_line(strategy, shards, tmp_path / "whole", *more))
    assert whole.code == 0, whole.err
    line = train_line(strategy, shards, tmp_path / "cut", *more)
    process = start(run_hpcdl, line, {"STEP_S": "0.05"})
    wait_for(lambda: steps_done(tmp_path / "cut") >= 15)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == 75
    resumed = run_hpcdl([*line, "--resume"])
    assert resumed.code == 0, resumed.err
    (stopped_at,) = record_of(tmp_path / "cut")["resumed_from_steps"]
    assert 15 <= stopped_at < 60
    same_run(tmp_path / "cut", tmp_path / "whole")


def plan_of(**settings: Any) -> Any:
    values = {"model": "lenet", "data": "synthetic:28x28x1:10", "ranks": 2, "batch-size": 8}
    values |= {name.replace("_", "-"): value for name, value in settings.items()}
    return prepare(load(TrainConfig, [Layer(origin="flag", values=values)]))


@pytest.mark.parametrize(("settings", "words"), [
    ({"strategy": "ring", "outer_rate": 0.7}, ["--outer-rate", "'ring' does not have it", "diloco"]),
    ({"strategy": "local-sgd", "outer_momentum": 0.5}, ["--outer-momentum", "'local-sgd'", "slowmo, diloco or"]),
    ({"strategy": "diloco", "post_local_start": 5}, ["--post-local-start", "'diloco'", "use local-sgd"]),
    ({"strategy": "slowmo", "outer_momentum": 1.0}, ["outer-momentum", "at most 0.9999"]),
    ({"strategy": "diloco", "outer_rate": 0.0}, ["outer-rate", "above 0"]),
    ({"strategy": "slowmo", "moving_rate": 0.1}, ["--moving-rate", "no elastic exchange"]),
    ({"strategy": "local-sgd", "compress": "fp16"}, ["--compress fp16", "'local-sgd' does not have it"]),
    ({"strategy": "local-sgd", "groups": 2}, ["--groups 2", "does not sum gradients"]),
    ({"strategy": "diloco", "keep_batch": 16}, ["--keep-batch 16", "take steps of their own"]),
    ({"strategy": "local-sgd", "unpacked": True}, ["--unpacked"]),
    ({"strategy": "streaming-diloco", "period_within": 2}, ["--period-within", "use local-sgd, slowmo or diloco"]),
    ({"strategy": "ring", "period_between": 2}, ["--period-between", "use local-sgd, slowmo or diloco"]),
    ({"strategy": "local-sgd", "period_within": 3}, ["--period-within 3", "every 8 steps", "use one of 1, 2, 4, or"]),
    ({"strategy": "local-sgd", "period_within": 8}, ["--period-within 8", "a larger multiple"]),
    ({"strategy": "diloco", "period_between": 20}, ["--period-between 20: goes with --period-within", "--period 20"]),
    ({"strategy": "diloco", "period": 5, "period_within": 2, "period_between": 20}, ["the same", "leave --period out"]),
    ({"strategy": "ring", "period": "auto"}, ["--period auto", "use local-sgd, slowmo or diloco"]),
    ({"strategy": "streaming-diloco", "period": "auto"}, ["--period auto", "beside its steps", "use diloco"]),
    ({"strategy": "diloco", "period": "auto", "period_within": 2, "period_between": 20}, ["the same setting"]),
    ({"strategy": "diloco", "fragments": 2}, ["--fragments", "'diloco' does not have it", "use streaming-diloco"]),
    ({"strategy": "diloco", "mixing": 1.0}, ["--mixing", "use streaming-diloco"]),
    ({"strategy": "streaming-diloco", "mixing": 1.5}, ["mixing", "at most 1"]),
    ({"strategy": "streaming-diloco", "period": 3, "fragments": 4}, ["--fragments 4", "period of 3 steps", "use"]),
    ({"strategy": "streaming-diloco", "period": 9, "overlap": 3}, ["--overlap 3", "4 fragments", "2 or less"]),
    ({"strategy": "streaming-diloco", "post_local_start": 5}, ["--post-local-start", "use local-sgd"]),
])  # fmt: skip
def test_what_a_method_does_not_have_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(**settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_each_has_a_period_of_its_own_unless_another_is_given(name: str) -> None:
    found = plan_of(strategy=name)
    assert found.config.elastic.period == METHODS[name].period
    assert f"an exchange every {METHODS[name].period} steps" in rule_in_force(found)
    assert plan_of(strategy=name, period=3).config.elastic.period == 3
    assert plan_of(strategy="sync-easgd").config.elastic.period == 1
    resolved = load(TrainConfig, [Layer(origin="flag", values={
        "model": "lenet", "data": "synthetic:28x28x1:10", "strategy": name
    })])  # fmt: skip
    info = find_strategy(name)
    once = with_own_period(resolved, info)
    assert with_own_period(once, info) is once and once.origins["period"] == f"strategy {name}"


def test_the_period_between_nodes_is_the_period() -> None:
    found = plan_of(strategy="local-sgd", period_within=5, period_between=20)
    assert found.config.elastic.period == 20
    assert "an exchange every 20 steps, inside a node every 5;" in rule_in_force(found)


@pytest.mark.parametrize(("step_s", "exchange_s", "epoch", "multiple", "steps"), [
    (0.1, 0.1, 0, 1, 9),
    (0.1, 0.02, 1000, 1, 2),
    (0.1, 0.001, 1000, 1, 1),
    (0.1, 10.0, 1000, 1, 100),
    (0.1, 10.0, 7, 1, 1),
    (0.1, 0.1, 1000, 4, 12),
])  # fmt: skip
def test_the_period_found_has_exchanges_take_a_tenth(
    step_s: float, exchange_s: float, epoch: int, multiple: int, steps: int
) -> None:
    assert period_for(step_s, exchange_s, epoch, multiple) == steps


@pytest.mark.long
@pytest.mark.mpi
def test_a_run_chooses_its_period_and_keeps_it(run_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    line = train_line("local-sgd", shards, tmp_path / "run", "--period", "auto", "--steps", 40)
    line = [word for word in line if word != "--deterministic"] + ["--model", f"{PLANTED}:build"]
    process = start(run_hpcdl, line, {"STEP_S": "0.05"})
    wait_for(lambda: steps_done(tmp_path / "run") >= 16)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == 75
    assert run_hpcdl([*line, "--resume"]).code == 0
    record = record_of(tmp_path / "run")
    period = record["period"]
    chosen = [found["details"]["period"] for found in record["rank_records"]]
    assert chosen[0] == chosen[1] and chosen[0]["steps"] == period >= 1
    journal = (tmp_path / "run" / "metrics.jsonl").read_text()
    steps = "1 step" if period == 1 else f"{period} steps"
    assert journal.count(f"--period auto: {steps}; a step takes") == 1
    assert journal.count(f"--period auto: {steps}, as before") == 1


def test_a_deterministic_run_measures_no_period() -> None:
    context = dataclasses.replace(context_of("slowmo", threads.alone(), 0, 200, period="auto"), deterministic=True)
    choosing = PeriodChoosing(context)
    choosing.began(all_meet=False)
    assert choosing.timed_enough()
    assert "not measured, because of --deterministic" in choosing.choose(SharedWeights(context))
    assert choosing.period == METHODS["slowmo"].period


@pytest.mark.long
def test_a_period_beyond_a_tenth_of_an_epoch_is_warned_of(run_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    finished = run_hpcdl(train_line("diloco", shards, tmp_path / "long", "--steps", 4))
    assert finished.code == 0, finished.err
    (warning,) = [line for line in record_of(tmp_path / "long")["warnings"] if "tenth of an epoch" in line]
    assert warning.startswith("--period 50 is more than a tenth of an epoch")
    assert warning in finished.out + finished.err


@pytest.mark.parametrize("name", METHODS)
def test_the_step_bench_says_what_it_cannot(name: str) -> None:
    from hpcdl.bench.step import run

    values = {"model": "lenet", "strategy": name, "ranks": 2, "period": 4}
    with pytest.raises(UsageError, match="--period 4: bench step measures one step"):
        run(load(StepBenchConfig, [Layer(origin="flag", values=values)]), print)

"""Predictions of compressed runs on clusters with known truth: intervals hold, and bytes equal the counted ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy
import pytest

from hpcdl.predict.answer import Question, answer, command_of
from hpcdl.predict.evidence import gather_evidence
from hpcdl.predict.forecast import Forecast
from hpcdl.predict.messages import coded_bytes_of, coded_messages
from hpcdl.predict.network import UNKNOWN
from hpcdl.report.runs.run import Run
from tests.predict.clusters import Cluster, make_cluster, measured
from tests.report.synthetic import make_run

AHEAD = (8, 16, 32)
SENT: dict[str, Callable[[float, int], float]] = {
    "int8": lambda values, p: 2 * (1 + 4 / 256) * values * (p - 1) / p,
    "topk:1%": lambda values, p: 8 * 0.01 * values * (p - 1),
    "powersgd:4": lambda values, p: 2 * (4 * 0.02 * values) * (p - 1) / p,
}
"""Bytes that a rank sends for a number of values, by docs/reference/collectives.md; thin matrices are 2 % of all."""
ROUNDS: dict[str, Callable[[int], int]] = {
    "int8": lambda p: 2,
    "topk:1%": lambda p: 1,
    "powersgd:4": lambda p: 4 * (p - 1),
}


def true_step(cluster: Cluster, form: str, workers: int, seed: int, coding_s: float) -> float:
    """Return a step's seconds: computing on the slowest node, coding all values once, then all messages."""
    random = numpy.random.default_rng([cluster.seed, seed, workers, len(form)])
    mean = cluster.image_s * cluster.batch * math.exp(cluster.runs * random.standard_normal())
    slow = numpy.exp(cluster.nodes * random.standard_normal(workers))
    own = numpy.exp(cluster.noise * random.standard_normal((60, workers)) - cluster.noise**2 / 2)
    slowest = float((mean * slow * own).max(axis=1).mean())
    if workers == 1:
        return slowest + cluster.update_s
    values = cluster.num_bytes / 4
    byte_s = cluster.byte_s * (max(2, workers) / 2) ** cluster.contention
    messages = SENT[form](values, workers) * byte_s + ROUNDS[form](workers) * cluster.latency_s
    return slowest + cluster.update_s + coding_s * values + messages


def runs_of(cluster: Cluster, form: str, coding_s: float, *, counts: bool = True) -> list[Run]:
    """Return three runs each on 1, 2 and 4 workers."""
    found = []
    for workers in (1, 2, 4):
        for repeat in range(3):
            step = true_step(cluster, form, workers, repeat, coding_s)
            sent = SENT[form](cluster.num_bytes / 4, workers) if counts else None
            found.append(make_run(
                workers, workers * cluster.batch / step, name=f"{form}-{workers}-{repeat}", model=cluster.model,
                batch_per_rank=cluster.batch, gradient_bytes=cluster.num_bytes, step_seconds=step,
                bytes_per_step=sent, config={"compress": form, "bucket-size": str(25 * 1024**2)},
            ))  # fmt: skip
    return found


def plain_runs(cluster: Cluster) -> list[Run]:
    return [measured(cluster, "ring", workers, 100 * repeat + 7) for workers in (1, 2, 4) for repeat in range(3)]


@pytest.mark.parametrize("form", SENT)
@pytest.mark.parametrize("beside", [True, False], ids=["beside plain runs", "alone"])
def test_intervals_hold_the_truth_of_larger_sizes(form: str, beside: bool) -> None:
    covered, errors = [], []
    for seed in range(2000, 2008):
        cluster = make_cluster(seed)
        coding_s = float(numpy.random.default_rng(seed).uniform(2e-9, 3e-8))
        runs = runs_of(cluster, form, coding_s) + (plain_runs(cluster) if beside else [])
        (evidence,) = gather_evidence(runs, None)
        forecast = Forecast(evidence, None)
        for workers in AHEAD:
            found = forecast.predict(evidence.at(f"ring {form}", workers, workers, 0)).step_seconds
            true = true_step(cluster, form, workers, 9999, coding_s)
            covered.append(found.low <= true <= found.high)
            errors.append(abs(math.log(found.mean / true)))
    print(form, sum(covered), "of", len(covered), "median error", sorted(errors)[len(errors) // 2])
    assert sum(covered) >= 0.8 * len(covered)
    assert sorted(errors)[len(errors) // 2] < 0.08


def test_the_plain_strategy_is_predicted_as_if_no_run_were_compressed() -> None:
    """Compressed runs change the prediction of the plain strategy only by what they show of the network."""
    cluster = make_cluster(2004)
    (both,) = gather_evidence([*plain_runs(cluster), *runs_of(cluster, "int8", 1e-8)], None)
    assert both.strategies == ["ring", "ring int8"] and not both.remarks
    plain, coded = (both.job(label, 16, 1) for label in both.strategies)
    assert plain is not None and coded is not None
    assert (plain.compress, plain.coded_bytes) == ("none", 0.0)
    assert coded == dataclasses.replace(plain, compress="int8", coded_bytes=coded.coded_bytes)
    (alone,) = gather_evidence(plain_runs(cluster), None)
    ours, theirs = (Forecast(one, None).predict(plain).step_seconds for one in (both, alone))
    assert ours.low < theirs.mean < ours.high


@pytest.mark.parametrize("form", SENT)
def test_bytes_of_other_sizes_follow_from_those_that_were_counted(form: str) -> None:
    cluster = make_cluster(2001)
    (evidence,) = gather_evidence(runs_of(cluster, form, 1e-8), None)
    for workers in (2, 8, 64):
        job = evidence.at(f"ring {form}", workers, workers, 0)
        sent = coded_messages(job, 1.0, UNKNOWN).bytes
        assert sent == pytest.approx(SENT[form](cluster.num_bytes / 4, workers), rel=0.01)


def test_without_counts_a_form_has_its_own_size_where_it_has_one() -> None:
    cluster = make_cluster(2001)
    for form, known in (("int8", True), ("topk:1%", True), ("powersgd:4", False), ("int7", False)):
        runs = runs_of(cluster, "int8", 1e-8, counts=False)
        runs = [dataclasses.replace(run, config={"compress": form}) for run in runs]
        found = coded_bytes_of(runs)
        assert (form in found) == known
        if known:
            assert found[form] == pytest.approx(SENT[form](cluster.num_bytes / 4, 2) * (1 if form == "topk:1%" else 2))


def test_workers_of_a_node_share_its_link() -> None:
    """In an all-to-all, messages within a node stay there; all others share the node's one link."""
    cluster = make_cluster(2001)
    (evidence,) = gather_evidence(runs_of(cluster, "int8", 1e-8), None)
    job = evidence.at("ring int8", 8, 8, 0)
    apart = coded_messages(job, 1.0, UNKNOWN)
    together = coded_messages(dataclasses.replace(job, nodes=2, workers_per_node=4), 1.0, UNKNOWN)
    assert together.bytes == pytest.approx(4 * 4 / 7 * apart.bytes)
    assert together.memory_bytes == pytest.approx(3 / 7 * apart.bytes)
    inside = coded_messages(dataclasses.replace(job, nodes=1, workers_per_node=8), 1.0, UNKNOWN)
    assert inside.bytes == 0 and inside.memory_bytes == pytest.approx(apart.bytes)


def test_fragments_of_streaming_diloco_are_counted_by_their_form() -> None:
    cluster = make_cluster(2001)
    runs = [
        dataclasses.replace(run, strategy="streaming-diloco", bytes_per_step=1.0,
                            config={**run.config, "compress": "fp4", "period": "40", "fragments": "4"})
        for run in runs_of(cluster, "int8", 1e-8)
    ]  # fmt: skip
    (evidence,) = gather_evidence(runs, None)
    job = evidence.at("streaming-diloco fp4", 8, 8, 0)
    assert (job.period, job.fragments) == (40, 4)
    sent = coded_messages(job, 1 / job.fragments, UNKNOWN).bytes
    assert sent == pytest.approx(2 * (0.5 + 4 / 256) * cluster.num_bytes / 4 / 4 * 7 / 8)
    step = Forecast(evidence, None).predict(job)
    assert 0 < step.losses["coding"] < 1


def test_an_answer_has_rows_for_each_form_and_a_run_that_has_it() -> None:
    cluster = make_cluster(2003)
    runs = [*plain_runs(cluster), *runs_of(cluster, "powersgd:4", 2e-8)]
    found = answer(Question(nodes=(16,), strategies=("ring",)), runs)
    rows = {row["strategy"]: row for row in found.as_json()["predictions"]}
    assert set(rows) == {"ring", "ring powersgd:4"}
    assert {row["strategy"] for row in found.as_json()["backtest"]} == set(rows)
    coded = [item.job for item in found.predictions if item.job.compress == "powersgd:4"]
    assert "--compress powersgd:4" in command_of(coded[0], "DIR")

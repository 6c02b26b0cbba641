"""On clusters with known truth, intervals cover as often as they claim, and the recommended strategy is good."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import pytest

from hpcdl.predict.evidence import gather_evidence
from hpcdl.predict.forecast import Forecast
from tests.predict.clusters import STRATEGIES, make_cluster, study, true_step

AHEAD = (8, 16, 32)
"""Numbers of workers predicted from runs on 1, 2 and 4."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """For one cluster: whether each interval held, the error of each prediction, the recommendation's cost."""

    covered: list[bool]
    errors: list[float]
    loss: float


def judge(seed: int) -> Outcome:
    """Predict a cluster, then simulate the truth. Odd seeds measure parts of steps, even seeds whole steps."""
    cluster = make_cluster(seed)
    evidence = gather_evidence(study(cluster, parts=seed % 2 == 1), None)[0]
    forecast = Forecast(evidence, None)
    covered, errors = [], []
    predicted, truth = {}, {}
    for strategy in STRATEGIES:
        servers = cluster.num_servers if strategy == "ps" else 0
        for workers in AHEAD:
            found = forecast.predict(evidence.at(strategy, workers + servers, workers, servers)).step_seconds
            true = sum(true_step(cluster, strategy, workers, 9999).values())
            covered.append(found.low <= true <= found.high)
            errors.append(abs(math.log(found.mean / true)))
        predicted[strategy], truth[strategy] = found.mean, true
    return Outcome(
        covered=covered,
        errors=errors,
        loss=truth[min(predicted, key=lambda name: predicted[name])] / min(truth.values()) - 1,
    )


LEAST, MOST = 0.85, 0.995
"""Share of 90 % intervals that hold: above 90 % here, because real clusters follow other laws (other_laws.py)."""


def check(outcomes: list[Outcome]) -> None:
    covered = [hit for outcome in outcomes for hit in outcome.covered]
    errors = sorted(error for outcome in outcomes for error in outcome.errors)
    good = [outcome.loss <= 0.05 for outcome in outcomes]
    reported = (
        f"coverage {sum(covered) / len(covered):.3f}, median error {errors[len(errors) // 2]:.3f}, good {sum(good)}"
    )
    print(f"{len(outcomes)} clusters: {reported}")
    assert LEAST <= sum(covered) / len(covered) <= MOST, reported
    assert errors[len(errors) // 2] < 0.05, reported
    assert sum(good) >= 0.95 * len(good), reported


def test_intervals_of_thirty_clusters_hold() -> None:
    """Intervals hold on thirty clusters; so few, with dependent points, leave some percent of uncertainty."""
    check([judge(seed) for seed in range(1000, 1030)])


@pytest.mark.soak
def test_intervals_of_five_hundred_clusters_hold() -> None:
    check([judge(seed) for seed in range(500)])


def test_a_prediction_is_the_same_whatever_sign_eigenvectors_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction does not depend on the sign of eigenvectors, which the linear algebra library chooses."""
    cluster, eigh = make_cluster(7), numpy.linalg.eigh
    evidence = gather_evidence(study(cluster, parts=True), None)[0]
    found = []
    for sign in (1.0, -1.0):
        monkeypatch.setattr(numpy.linalg, "eigh", lambda matrix, sign=sign: (eigh(matrix)[0], sign * eigh(matrix)[1]))
        found.append(Forecast(evidence, None).predict(evidence.at("ring", 8, 8, 0)).step_seconds)
    assert found[0] == found[1]

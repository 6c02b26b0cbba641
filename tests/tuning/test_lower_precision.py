"""What tune-threads says of mixed_bfloat16: measured in turn, within the budget, told and never chosen."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcdl.node.machines import read_machine
from hpcdl.node.plan import launch_plan
from hpcdl.node.profile import Profile, read_profile, write_profile
from hpcdl.node.settings import Settings
from hpcdl.tuning.lower_precision import (
    LOWER,
    Allowance,
    LowerPrecision,
    check_command,
    measure_lower,
    reserved_samples,
)
from hpcdl.tuning.space import Candidate
from hpcdl.tuning.trials import FLOAT32, Measurer, TrialOutcome, Workload

TOPOLOGY = read_machine("generic").topology
SETTINGS = Settings(ranks_per_node=1, intra_op_threads=2)
CANDIDATE = Candidate(settings=SETTINGS, plan=launch_plan(TOPOLOGY, SETTINGS, 1, 1, openmp=False))
WORKLOAD = Workload(model="lenet", batch_size=16)
CHECK = {
    "model": "lenet", "batch_size": 16, "precision": LOWER, "outputs": 0.006, "gradients": 0.04, "variable": "w",
    "digits": {"network": "lenet", "epochs": 4, "seeds": [0, 1], "accuracy": {FLOAT32: [0.9, 1.0], LOWER: [0.9, 0.9]}},
}  # fmt: skip


class Simulated:
    """A node that is half as fast again in bfloat16; `fails` is a precision whose samples fail."""

    def __init__(self, seconds: float = 0.0, fails: str = "", check: Mapping[str, Any] | None = CHECK) -> None:
        self.seconds, self.fails, self.check = seconds, fails, check
        self.asked: list[str] = []

    def measure(
        self, candidate: Candidate, time_limit_s: float, prefix: Sequence[str] = (), precision: str = FLOAT32
    ) -> TrialOutcome:
        assert candidate is CANDIDATE and time_limit_s > 0
        self.asked.append(precision)
        time.sleep(self.seconds)
        if precision == self.fails:
            return TrialOutcome(status="failed", message="exit code 1: no", seconds=self.seconds)
        rate = 150.0 if precision == LOWER else 100.0
        return TrialOutcome(status="ok", images_per_second=rate, seconds=self.seconds)

    def document(
        self, words: Sequence[str], time_limit_s: float, prefix: Sequence[str] = ()
    ) -> tuple[Mapping[str, Any] | None, str]:
        self.asked.append("check")
        return self.check, "" if self.check else "exit code 1: no"


def measured(
    node: Simulated, samples: int | None = None, seconds: float = 60.0, instructions: Sequence[str] = ("avx512_bf16",)
) -> LowerPrecision:
    left = Allowance(deadline_s=time.monotonic() + seconds, samples=samples, trial_timeout_s=30.0)
    return measure_lower(CANDIDATE, WORKLOAD, node, instructions, left)


def test_both_precisions_take_turns_and_the_check_stands_beside_the_number() -> None:
    node = Simulated()
    found = measured(node)
    assert node.asked == [FLOAT32, LOWER] * 3 + ["check"]
    assert found.ratio == 1.5 and not found.problem
    number, check = found.sentences()
    assert "would bring 150 images/s against 100 images/s in float32: 1.50 x, n = 3 each" in number
    assert "not chosen" in number and f"--precision {LOWER}" in number
    assert "6.0e-03 of the largest output and 4.0e-02 of the largest gradient" in check
    assert "accuracy 0.900 against 0.950" in check


def test_without_instructions_one_line_says_so_and_nothing_is_measured() -> None:
    node = Simulated()
    (line,) = measured(node, instructions=()).sentences()
    assert line == f"{LOWER} was not measured: this processor has no bfloat16 instructions (avx512_bf16, amx_bf16)"
    assert node.asked == []


@pytest.mark.parametrize(
    ("most", "kept"), [(None, 0), (1, 0), (5, 0), (7, 0), (8, 2), (15, 2), (16, 4), (24, 6), (1000, 6)]
)
def test_samples_are_kept_for_it_out_of_those_that_are_allowed(most: int | None, kept: int) -> None:
    assert reserved_samples(most) == kept
    node = Simulated()
    found = measured(node, samples=None if most is None else kept)
    num_samples = 6 if most is None else kept
    assert len(node.asked) == num_samples + (num_samples > 0), "samples, and the check where there are some"
    assert ("--max-samples leaves no room" in " ".join(found.sentences())) is (most is not None and kept == 0)


def test_the_budget_ends_it() -> None:
    node = Simulated(seconds=0.4)
    found = measured(node, seconds=0.7)
    assert node.asked in ([FLOAT32], [FLOAT32, LOWER]), "no second pair, and no check"
    assert len(found.float32) == len(found.lower) == len(node.asked) - 1
    assert ("leaves no time" if len(node.asked) == 1 else "not checked: the budget is used up") in found.problem


def test_no_pair_begins_that_would_not_end_in_time() -> None:
    node = Simulated()
    left = Allowance(deadline_s=time.monotonic() + 10.0, samples=None, trial_timeout_s=30.0, usual_s=8.0)
    assert "give a longer --budget" in measure_lower(CANDIDATE, WORKLOAD, node, ["amx_bf16"], left).problem
    assert node.asked == []


def test_a_sample_that_the_budget_cuts_off_is_no_failure() -> None:
    class Slow(Simulated):
        def measure(self, *given: Any, **named: Any) -> TrialOutcome:
            return TrialOutcome(status="timeout", message="killed after its time limit")

    assert "the budget leaves no time" in measured(Slow(), seconds=20.0).problem
    assert "float32: timeout" in measured(Slow(), seconds=60.0).problem, "after all that one may take"


@pytest.mark.parametrize("fails", [FLOAT32, LOWER])
def test_a_sample_that_fails_is_told(fails: str) -> None:
    found = measured(Simulated(fails=fails))
    assert found.ratio is None and found.check is None
    assert found.problem == f"a sample in {fails}: failed; exit code 1: no"


def test_a_check_that_fails_is_told() -> None:
    found = measured(Simulated(check=None))
    assert found.ratio == 1.5 and found.sentences()[-1] == f"{LOWER}: its results were not checked: exit code 1: no"


def test_the_profile_keeps_it_and_obeys_it_in_nothing(tmp_path: Path) -> None:
    found = measured(Simulated()).as_document()
    profile = Profile(
        settings=SETTINGS, machine="m", processor="p", fingerprint="f", num_cores=2, model="lenet", batch_size=16,
        lower_precision=found,
    )  # fmt: skip
    write_profile(profile, tmp_path / "p.toml")
    again = read_profile(tmp_path / "p.toml")
    assert again.settings == SETTINGS and again.lower_precision == found
    assert json.loads(json.dumps(found))["ratio"] == 1.5


def test_a_sample_in_another_precision_is_the_same_command_with_it() -> None:
    code = "import json, sys; print(json.dumps({'step_seconds': 2.0 if sys.argv[1:] == [] else 1.0}))"
    measurer = Measurer(
        workload=WORKLOAD,
        topology=TOPOLOGY,
        command_of=lambda workload, settings, profile: [sys.executable, "-c", code],
    )
    rates = [measurer.measure(CANDIDATE, 30.0, (), precision).images_per_second for precision in (FLOAT32, LOWER)]
    assert rates == [8.0, 16.0]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('{\"a\": 1}')", ""),
        ("raise SystemExit('hpcdl: no')", "exit code 1: no"),
        ("print('Hello')", "no JSON in its output (JSONDecodeError)"),
        ("print('3')", "no JSON in its output (TypeError)"),
        ("import time; time.sleep(60)", "timeout"),
    ],
)
def test_what_a_command_prints(code: str, told: str) -> None:
    measurer = Measurer(workload=WORKLOAD, topology=TOPOLOGY)
    limit_s = 1.0 if told == "timeout" else 60.0
    assert measurer.document([sys.executable, "-c", code], limit_s) == (None if told else {"a": 1}, told)


def test_the_check_runs_the_users_network_on_the_users_data(tmp_path: Path) -> None:
    words = check_command(Workload(model="m.py:build", batch_size=4, data="shards"), 8)
    assert words[words.index("--model") + 1] == "m.py:build" and words[words.index("--precision") + 1] == LOWER
    assert words[words.index("--batch-size") + 1] == "8", "the winner's"
    assert Path(words[words.index("--data") + 1]).is_absolute()

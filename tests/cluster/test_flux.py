"""Flux, checked against its documentation: hpcdl was never run under it.

Sessions are from flux-framework/flux-core, doc/man1: flux-batch.rst (commit 1f88f1e), flux-jobs.rst (commit 00f198c).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from hpcdl.cluster.batch.script import batch_launcher, render
from hpcdl.cluster.batch.systems import InQueue, NodeWishes, find_system
from hpcdl.core.errors import UsageError
from tests.cluster.test_batch import program, request
from tests.conftest import CommandLine

SUBMITTED = "ƒM7Zq9AKHno\n"
"""Output of `flux batch -N 2 --queue=batch mybatch.sh`, from flux-batch(1)."""


def read_flux(script: str) -> list[str]:
    """Return the directives, read by the rules of flux-batch(1), "SUBMISSION DIRECTIVES".

    All have one sentinel and are contiguous; they are split as a shell does, and # begins a comment.
    """
    lines = script.splitlines()
    places = [number for number, line in enumerate(lines) if re.match(r"\W*(flux|FLUX):", line)]
    assert places == list(range(places[0], places[-1] + 1)), "a directive behind other lines is an error"
    sentinels = {re.match(r"\W*(?:flux|FLUX):", lines[place])[0] for place in places}  # type: ignore[index]
    assert len(sentinels) == 1, "two sentinels are an error"
    return [word for place in places for word in shlex.split(lines[place].split(":", 1)[1], comments=True)]


def test_the_script_asks_for_nodes_time_and_names() -> None:
    made = request(launcher="flux", name="my job # 1", time_s=3725.0, partition="debug", account="bank")
    options = read_flux(render(made, {}))
    assert {"--nodes=2", "--time-limit=63m", "--job-name=my job # 1", "--queue=debug", "--bank=bank"} <= set(options)
    assert "--exclusive" in options and f"--output={made.folder}/log-{{{{id}}}}.txt" in options
    assert not [option for option in options if option.startswith(("--nslots", "--cores"))]


def test_ranks_get_the_cores_that_are_asked_for() -> None:
    wanted = NodeWishes(cpus_per_task=4, constraint="rome", options=("--urgency=8",))
    options = read_flux(render(request(launcher="flux", nodes_wanted=wanted), {}))
    assert {"--nodes=2", "--nslots=6", "--cores-per-slot=4", "--requires=rome", "--urgency=8"} <= set(options)
    assert "--exclusive" not in options


@pytest.mark.parametrize(
    ("wanted", "reported"),
    [
        (NodeWishes(mem="8G"), "--mem: Flux has no such option"),
        (NodeWishes(options=("-t10",)), "type --time"),
        (NodeWishes(options=("--output=x",)), "submit sets it itself"),
    ],
)
def test_what_flux_cannot_do_is_refused(wanted: NodeWishes, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        render(request(launcher="flux", nodes_wanted=wanted), {})
    with pytest.raises(UsageError, match="cannot requeue itself"):
        render(request(launcher="flux", until_done=True), {})


def test_the_jobs_number_is_what_flux_batch_prints() -> None:
    found = find_system("flux").number.search(SUBMITTED)
    assert found is not None and found[1] == "ƒM7Zq9AKHno"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("PENDING insufficient resources\n", InQueue(state="pending", reason="insufficient resources")),
        ("PENDING \n", InQueue(state="pending")),
        ("RUNNING \n", InQueue(state="running")),
        ("COMPLETED \n", InQueue(state="completed")),
        ("CANCELED \n", InQueue(state="cancelled")),
        ("TIMEOUT \n", InQueue(state="timeout")),
    ],
)
def test_the_state_is_that_of_flux_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, found: InQueue
) -> None:
    """States are those of "JOB STATUS" in flux-jobs(1), the format that of its "{sched.reason_pending}"."""
    (tmp_path / "answer").write_text(answer)
    program(tmp_path / "bin", "flux", f'echo "$@" >{tmp_path}/asked; cat {tmp_path}/answer')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert find_system("flux").look("ƒ112345") == found
    assert (tmp_path / "asked").read_text() == "jobs -no {status} {sched.reason_pending} ƒ112345\n"
    assert find_system("flux").cancel("ƒ112345") == ["flux", "cancel", "ƒ112345"]


def test_a_machine_with_flux_submits_to_it(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    program(tmp_path / "bin", "flux", f"echo '{SUBMITTED.strip()}'")
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HPCDL_LAUNCHER": "flux"}
    assert batch_launcher({"PATH": str(tmp_path / "bin")}) == "flux"
    command = ["submit", "--nodes", "1", "--", "train", "--model", "lenet", "--data", "synthetic:mnist"]
    finished = ask_hpcdl([*command, "--strategy", "single"], env=env)
    assert finished.code == 0 and finished.out == SUBMITTED, finished.err

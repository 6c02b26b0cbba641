"""The first day's pages as typed on a cluster by an unprivileged user: with the module, and without it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Finished
from tests.docs.test_first_day import TASKS, script
from tests.lab.hosts import LOGIN, USER, USER_ID
from tests.lab.installed import Site
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab
NETWORK = {"LMOD_PAGER": "none", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
WAYS = ("module", "environment")
WITH_JOBS = ("batch-job", "killed-and-resumed", "slow-node")
ON_A_NODE = tuple(page for page in TASKS if page not in ("batch-job", "install-for-all"))


def cases(pages: tuple[str, ...], *each_time: tuple[str, str]) -> list[Any]:
    """Parametrize each page in both ways; those not in `each_time` run in the long version.

    `make test-all` submits with the module in test_session.py.
    """
    every = [(way, page) for way in WAYS for page in pages]
    return [pytest.param(*case, marks=() if case in each_time else pytest.mark.soak) for case in every]


def jobs_of(page: str) -> list[str]:
    """Return the lines of a page that submit a job, apart from its blocks, which another test runs."""
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    return re.findall(r"^ {4}(hpcdl submit .*)$", text, re.MULTILINE)


def desk(lab: SlurmLab, name: str, page: str) -> Path:
    """Return a user's folder with the files that the page assumes."""
    folder = lab.home / name
    folder.mkdir()
    TASKS[page][0](folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER_ID, USER_ID)
    return folder


def whole(site: Site, way: str, *commands: str) -> str:
    """Return a bash script that starts as a user's session does."""
    return site.script(*commands) if way == "module" else site.script_without_module(*commands)


def run(lab: SlurmLab, text: str, folder: Path, timeout_s: float = 300.0) -> Finished:
    """Run a script on the login node, as the user, in `folder`."""
    line = ["bash", "--noprofile", "--norc", "-c", text]
    return lab.run(line, host=LOGIN, user=USER, cwd=folder, env=NETWORK, timeout_s=timeout_s)


def records(folder: Path) -> dict[Path, dict[str, Any]]:
    return {path: json.loads(path.read_text()) for path in folder.rglob("record.json")}


def assert_cores(lab: SlurmLab, folder: Path, nodes: int, before: frozenset[Path] = frozenset()) -> None:
    """Assert that every run of a page has all CPUs of its nodes, by its record."""
    made = {path: record for path, record in records(folder).items() if path not in before}
    for path, record in made.items():
        assert record["status"] == "finished" and len(set(record["hosts"])) == nodes, (path, record["hosts"])
        assert set(record["hosts"]) <= set(lab.nodes), path
        assert record["environment"]["SLURM_CPUS_PER_TASK"] == str(lab.cpus_per_node), (path, record["environment"])


@pytest.mark.parametrize("way, page", cases(WITH_JOBS, ("module", "slow-node"), ("environment", "batch-job")))
def test_jobs_get_the_cores_that_they_ask_for(site: Site, lab_slurm: SlurmLab, way: str, page: str) -> None:
    """Jobs get the cores that they request, by Slurm and by the run's record: four nodes, each with its four CPUs."""
    folder = desk(lab_slurm, f"jobs-{way}-{page}", page)
    lines = jobs_of(page)
    assert lines
    submitted = run(lab_slurm, whole(site, way, *lines), folder)
    assert submitted.code == 0, submitted.err
    for number in submitted.out.split():
        job = lab_slurm.wait_for_job(int(number), timeout_s=500)
        reported = "\n".join(path.read_text() for path in folder.rglob(f"log-{number}.txt"))
        assert (job["JobState"], job["NumNodes"], job["NumCPUs"]) == ("COMPLETED", "4", "16"), reported
        shown = run(lab_slurm, whole(site, way, f"hpcdl jobs {number}", f"hpcdl cancel {number}"), folder)
        assert shown.code == 0 and f"job {number} had ended before: completed" in shown.out, shown
    assert bool(records(folder)) == (page != "slow-node")
    assert_cores(lab_slurm, folder, nodes=4)


@pytest.mark.parametrize("way, page", cases(ON_A_NODE, ("module", "own-script")))
def test_pages_run_as_typed_on_a_node(site: Site, lab_slurm: SlurmLab, way: str, page: str) -> None:
    """A job of one node runs the page's lines from top to bottom."""
    folder = desk(lab_slurm, f"page-{way}-{page}", page)
    before = frozenset(records(folder))
    (folder / "page.sh").write_text("#!/bin/bash\n" + whole(site, way, "set -o pipefail", script(page)))
    options = ("--nodes=1", f"--cpus-per-task={lab_slurm.cpus_per_node}", "--output=said.txt")
    line = ["sbatch", "--parsable", *options, "page.sh"]
    submitted = lab_slurm.run(line, user=USER, cwd=folder, env=NETWORK)
    assert submitted.code == 0, submitted.err
    job = lab_slurm.wait_for_job(int(submitted.out), timeout_s=900)
    reported = (folder / "said.txt").read_text()
    assert job["JobState"] == "COMPLETED" and "Traceback" not in reported, reported
    assert (folder / TASKS[page][1]).exists()
    assert_cores(lab_slurm, folder, nodes=1, before=before)

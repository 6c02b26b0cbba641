"""The tutorial's commands, as written, by an unprivileged user on four Slurm nodes with hpcdl installed as a module."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import ROOT
from tests.lab.hosts import LOGIN, USER
from tests.lab.installed import Site
from tests.lab.needs import LMOD
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab
TUTORIAL = ROOT / "docs" / "tutorials" / "stampede-style-session.md"
VERSIONS = ("1.0", pytest.param("1.1-openmpi", marks=pytest.mark.soak))
"""The embedded MPICH (pmi2) and the site's Open MPI (pmix)."""


def commands() -> str:
    blocks = re.findall(r"^```bash\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    return "\n".join(blocks)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tutorial_runs_as_written(site: Site, lab_slurm: SlurmLab, version: str) -> None:
    """The tutorial works as written; only the version is added to `module load hpcdl`, because two are installed."""
    home = lab_slurm.home / version
    text = commands().replace("module load hpcdl\n", f"module load hpcdl/{version}\nset -e\n")
    lines = (f"source {LMOD}/init/bash", f"module use {site.moduledir}", f"mkdir {home} && cd {home}", text)
    script = "\n".join(lines)
    # The lab's hosts share one kernel: otherwise Open MPI would use its shared memory, not the network.
    environment = {"LMOD_PAGER": "none", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    line = ["bash", "--noprofile", "--norc", "-c", script]
    finished = lab_slurm.run(line, host=LOGIN, user=USER, env=environment, timeout_s=900)
    logs = "\n".join(path.read_text() for name in ("log-*.txt", "launcher.log") for path in home.rglob(name))
    assert finished.code == 0, finished.out + finished.err + logs
    record = json.loads((home / "session" / "four" / "record.json").read_text())
    assert (record["status"], record["ranks"], record["steps"]) == ("finished", 4, 20), logs
    assert record["hosts"] == ["node1", "node2", "node3", "node4"]
    assert record["environment"]["SLURM_CPUS_PER_TASK"] == str(lab_slurm.cpus_per_node)
    assert (home / "session" / "report" / "report.html").stat().st_size > 10_000

"""Fixtures of the lab's own tests: hosts that reach each other by ssh, and a cluster that tests may damage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab import hosts, ssh
from tests.lab.slurm import SlurmLab


@pytest.fixture(scope="session")
def lab_ssh(lab_slurm: SlurmLab) -> SlurmLab:
    """The lab's cluster, whose hosts also run sshd."""
    ssh.start(lab_slurm)
    return lab_slurm


@pytest.fixture
def frail_lab() -> Iterator[SlurmLab]:
    """A cluster of four nodes for one test, which may cut their power."""
    with hosts.lab_folder() as folder:
        lab = SlurmLab(folder, num_nodes=4)
        try:
            lab.start()
            ssh.start(lab)
            yield lab
        finally:
            lab.stop()

"""`hpcdl doctor --nodes all` in a real job of four nodes, each of which has a fault of its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.lab import quota
from tests.lab.desk import Desk
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab
AHEAD = '#!/bin/sh\nexec /usr/bin/env -i /tmp/real-date -d "+30 seconds" "$@"\n'
CHANGES = {
    "node1": ("mount -t tmpfs -o size=1m tmpfs /tmp/own", "umount /tmp/own"),
    "node2": (
        "cp -p $(readlink -f /bin/date) /tmp/real-date && mount --bind {data}/../date $(readlink -f /bin/date)",
        "umount $(readlink -f /bin/date); rm /tmp/real-date",
    ),
    "node3": ("tc qdisc add dev eth0 root tbf rate 20mbit burst 32kb latency 50ms", "tc qdisc del dev eth0 root"),
    "node4": ("mount -t tmpfs tmpfs {data}", "umount {data}"),
}
"""A full local disk; a clock ahead; a slow link; a file system that is not mounted."""


@contextlib.contextmanager
def changed(lab: SlurmLab, data: str) -> Iterator[None]:
    """Apply all CHANGES, and give node3 a tenth of a processor."""
    group = quota.make_group(f"{lab.folder.name}-slow", 0.1)
    procs, parent = group / "cgroup.procs", group.parent / "cgroup.procs"
    number = f"$(cat {lab.slurm}/run/slurmd.node3.pid)"
    with contextlib.ExitStack() as undo:
        undo.callback(quota.remove, group)
        lab.change(f"echo {number} > {procs}", host="node3")
        undo.callback(lab.change, f"echo {number} > {parent}", host="node3")
        for host, (change, back) in CHANGES.items():
            lab.change("mkdir /tmp/own", host=host)
            undo.callback(lab.change, "rmdir /tmp/own", host=host)
            lab.change(change.format(data=data), host=host)
            undo.callback(lab.change, back.format(data=data), host=host)
        yield


def test_each_node_is_named_with_what_it_has_of_its_own(lab_slurm: SlurmLab) -> None:
    desk = Desk(lab_slurm, lab_slurm.shared / "nodes", {"HPCDL_NODE_STORAGE": "/tmp/own"})
    data = desk.folder / "data"
    data.mkdir(parents=True)
    (desk.folder / "date").write_text(AHEAD)
    (desk.folder / "date").chmod(0o755)
    with changed(lab_slurm, str(data)):
        words = ("--nodes", "4", "--time", "5m", "--name", "look", "--", "doctor", "--nodes", "all", "--data", "data")
        number = int(desk.hpcdl("submit", *words).out)
        job = lab_slurm.wait_for_job(number, timeout_s=240)
    text = desk.log(number)
    assert job["JobState"] == "FAILED" and job["ExitCode"] == "1:0", text
    rates = [float(rate) for rate in re.findall(r"^node\d +([\d.]+) ", text, re.MULTILINE)]
    # Not "node3 is first": beside other work the other nodes' share of a core may be less than a tenth.
    assert len(rates) == 4 and rates == sorted(rates), f"the slowest stands first\n{text}"
    for line in (
        # On a busy machine the other hosts may be hardly faster: then at least one of the two measurements shows it.
        r"warning  (gflops|copy-gib-s) +node3: [\d.]+ G\S+/s \([a-z ]+\), \d+% of the median node's",
        r"warning  links +node3, over all of its links: 1 MiB takes",
        r"FAILURE  clocks +the clock of node2 is ahead by (2\d|30)(\.\d+)? s or more",
        r"FAILURE  data +node4 has tmpfs; the others \w+$",
        r"FAILURE  scratch +node1: /tmp/own has 1 MiB free: it is full",
        r"ok       tensorflow +\d",
    ):
        assert re.search(f"^{line}", text, re.MULTILINE), f"{line}\n{text}"
    assert text.count("FAILURE") == 3, text

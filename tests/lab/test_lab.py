"""The lab works as described: separate hosts, a shaped network, a Slurm that runs jobs, and nothing left behind."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import patience
from tests.lab import hosts
from tests.lab.hosts import USER, Lab
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab

SEND = """
import socket, sys, time
start = time.monotonic()
with socket.create_connection(("node1", 5000)) as peer:
    peer.sendall(bytes(int(sys.argv[1])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
print(time.monotonic() - start)
"""
RECEIVE = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        pass
    peer.sendall(b".")
"""


def test_hosts_are_separate(lab_slurm: SlurmLab) -> None:
    for host in ("login", "node1", "node4"):
        assert lab_slurm.run(["hostname"], host=host).out == f"{host}\n"
    lab_slurm.run(["touch", "/tmp/only-here", "/dev/shm/only-here"], host="node1")
    assert "only-here" in lab_slurm.run(["ls", "/tmp", "/dev/shm"], host="node1").out
    assert "only-here" not in lab_slurm.run(["ls", "/tmp", "/dev/shm"], host="node2").out
    assert not Path("/tmp/only-here").exists()
    (lab_slurm.shared / "everywhere").write_text("yes")
    assert lab_slurm.run(["cat", lab_slurm.shared / "everywhere"], host="node3", user=USER).out == "yes"
    own = lab_slurm.run(["ps", "-e", "-o", "comm="], host="node2").out.split()
    assert "slurmd" in own and "slurmctld" not in own


def test_jobs_run_on_every_node(lab_slurm: SlurmLab) -> None:
    finished = lab_slurm.run(["srun", "--mpi=none", "-N4", "bash", "-c", "echo $(hostname) $(id -un) $PWD"], user=USER)
    assert finished.code == 0, finished.err
    home = str(lab_slurm.home)
    assert sorted(finished.out.splitlines()) == [f"node{i} {USER} {home}" for i in range(1, 5)]


def test_a_batch_job_ends_with_its_own_code(lab_slurm: SlurmLab) -> None:
    script = lab_slurm.home / "fails.sh"
    script.write_text("#!/bin/bash\nsrun --mpi=none hostname\nexit 7\n")
    job = lab_slurm.wait_for_job(lab_slurm.submit(script, "-N2", "--output=fails.log", cwd=lab_slurm.home))
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "7:0")
    assert set((lab_slurm.home / "fails.log").read_text().split()) == {"node1", "node2"}


@pytest.mark.lab("hosts")
def test_a_shaped_network_is_as_slow_as_asked() -> None:
    """A shaped network is never faster than its rate. It may be slower: the fastest of up to five transfers counts."""
    with hosts.lab_folder() as folder:
        lab = Lab(folder, num_nodes=2, rate="200mbit")
        try:
            lab.start()
            rates = [megabits_per_second(lab)]
            while len(rates) < 5 and max(rates) < 150:
                rates.append(megabits_per_second(lab))
        finally:
            lab.stop()
    assert 150 < max(rates) < 215, rates


@pytest.mark.lab("hosts", "delayed-hosts")
def test_a_switch_delays_and_limits_what_it_carries() -> None:
    """A switch adds its delay to a connection in each direction, and limits the rate of its bytes."""
    with hosts.lab_folder() as folder:
        lab = Lab(folder, num_nodes=2, rate="200mbit", delay_ms=50.0)
        try:
            lab.start()
            switch = lab.holders["wires"]
            rate = megabits_per_second(lab)
            began = time.monotonic()
            assert lab.run(["bash", "-c", "echo > /dev/tcp/node1/1"], host="node2").code  # no process listens there
            answered_s = time.monotonic() - began
        finally:
            lab.stop()
    assert answered_s >= 0.1
    assert 20 < rate < 215
    assert switch.poll() is not None


def megabits_per_second(lab: Lab) -> float:
    """Return the rate of 25 MB that node2 sends to node1."""
    receiver = lab.command(["/usr/bin/python3", "-c", RECEIVE], host="node1")
    with subprocess.Popen(receiver, stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline() == b"ready\n"
        finished = lab.run(["/usr/bin/python3", "-c", SEND, str(25_000_000)], host="node2")
        assert server.wait(timeout=300) == 0
    assert finished.code == 0, finished.err
    return 25 * 8 / float(finished.out)


@pytest.mark.lab("hosts", "slurm")
def test_nothing_is_left_behind() -> None:
    before = Path("/proc/self/mountinfo").read_text(), sorted(Path("/etc").iterdir()), addresses()
    with hosts.lab_folder() as folder:
        lab = SlurmLab(folder, num_nodes=1)
        lab.start()
        inits = [holder.pid for holder in lab.holders.values()]
        lab.run(["sh", "-c", "sleep 300 >/dev/null 2>&1 &"], host="node1")
        assert "sleep 300" in lab.run(["ps", "-e", "-o", "args="], host="node1").out
        lab.stop()
        assert not any(Path(f"/proc/{number}").exists() for number in inits)
        deadline = time.monotonic() + patience(5)
        while (left := users_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    assert not folder.exists()
    assert (Path("/proc/self/mountinfo").read_text(), sorted(Path("/etc").iterdir()), addresses()) == before


def users_of(folder: Path) -> list[str]:
    """Return the command lines of this machine's processes that name `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if bytes(folder) in text:
            found.append(re.sub(r"\0", " ", text.decode(errors="replace")))
    return found


def addresses() -> list[str]:
    """Return the names of this machine's network interfaces."""
    shown = subprocess.run(["ip", "-json", "link"], capture_output=True, text=True, check=True).stdout
    return sorted(str(link["ifname"]) for link in json.loads(shown))

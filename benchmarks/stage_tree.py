"""Bytes that `--stage-env` reads from the shared file system, and its time: each node by itself, and one rank for all.

    sudo .venv/bin/python -m benchmarks.stage_tree [--mib 64] [--hosts 4] [--rate 200mbit]

On the lab's hosts (network namespaces that send at most --rate each; needs root). The login host acts as the shared
file system: it serves one packed file over its own shaped link, and its counters give the bytes sent. Then the same
for thousands of nodes, by a model with two given rates: `--read-gb` of the file system, `--link-gb` of a node.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from benchmarks.shaped_hosts import run_on
from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from hpcdl.cluster.own_env import UNPACK
from hpcdl.comm.mpi.spread import BLOCK_BYTES
from tests.lab.hosts import ADDRESSES, LOGIN, Lab, lab_folder
from tests.lab.needs import missing

PORT = 8023
FILES = 64
MODELLED = (4, 64, 1024, 4096)
LATENCY_S = 5e-6
FETCH = f"""
import shutil, sys, urllib.request
with urllib.request.urlopen("http://{ADDRESSES[LOGIN]}:{PORT}/packed.tar") as source, open(sys.argv[1], "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
"""
FED = """
mkfifo /tmp/$1; shift
if [ "${PMI_RANK:-0}" = 0 ]; then "$1" -c "$2" /tmp/packed & fi
shift 2
exec "$@"
"""
"""A pipe stands for the packed file on the shared file system: opening it sends the file over the network."""


def sent_bytes(lab: Lab) -> int:
    """Return the bytes that the file system's host has sent so far."""
    found = re.search(r"eth0:((?:\s+\d+)+)", lab.run(["cat", "/proc/net/dev"]).out)
    assert found is not None
    return int(found[1].split()[8])


def each_for_itself(lab: Lab, folder: str) -> None:
    """Let every node open the packed file."""
    command = ["bash", "-c", FED, "fed", "packed", sys.executable, FETCH, "bash", "-c", UNPACK, "unpack", folder]
    running = [subprocess.Popen(lab.command([*command, "/tmp/packed"], host=node)) for node in lab.nodes]
    if any(process.wait(timeout=300) for process in running):
        raise SystemExit("a node could not unpack")


def one_for_all(lab: Lab, folder: str) -> None:
    """Let rank 0 open the packed file and broadcast it."""
    # mpiexec's shell on the nodes takes one line of text, so long texts are in a file that all nodes see.
    (lab.shared / "fed.sh").write_text(FED)
    (lab.shared / "fetch.py").write_text(FETCH)
    (lab.shared / "unpack.sh").write_text(UNPACK)
    fetch = f"exec(open('{lab.shared}/fetch.py').read())"
    spread = [sys.executable, "-P", "-m", "hpcdl.comm.mpi.spread", "/tmp/packed", str(len(lab.nodes))]
    program = [*spread, "bash", str(lab.shared / "unpack.sh"), folder, "-"]
    command = ["bash", str(lab.shared / "fed.sh"), "packed", sys.executable, fetch, *program]
    run_on(lab, find_mpiexec().path, command, 300, {"FI_PROVIDER": "tcp"})


def measured(num_hosts: int, mib: float, rate: str) -> list[dict[str, object]]:
    """Measure both ways in sequence, each on new hosts."""
    rows = []
    for way in (each_for_itself, one_for_all):
        with lab_folder() as folder:
            lab = Lab(folder, num_nodes=num_hosts, rate=rate)
            try:
                lab.start()
                size = pack(lab.shared / "packed.tar", mib)
                serve = [sys.executable, "-m", "http.server", str(PORT), "--directory", lab.shared]
                server = subprocess.Popen(lab.command(serve), stderr=subprocess.DEVNULL)
                time.sleep(1)
                before, began = sent_bytes(lab), time.monotonic()
                way(lab, "/tmp/unpacked")
                seconds = time.monotonic() - began
                sent = sent_bytes(lab) - before
                server.terminate()
                whole = all(len(lab.run(["ls", "/tmp/unpacked"], host=node).out.split()) == FILES for node in lab.nodes)
                rows.append(
                    {
                        "way": way.__name__,
                        "file_mib": size / 2**20,
                        "read_mib": sent / 2**20,
                        "seconds": seconds,
                        "whole": whole,
                    }
                )
            finally:
                lab.stop()
    return rows


def pack(path: Path, mib: float) -> int:
    """Write a tar of random files; return its size."""
    part = path.with_name("part")
    part.write_bytes(os.urandom(round(mib * 2**20 / FILES)))
    with tarfile.open(path, "w") as tar:
        for number in range(FILES):
            tar.add(part, f"{number:03d}")
    return path.stat().st_size


def modelled(num_nodes: int, num_bytes: float, read_rate: float, link_rate: float) -> dict[str, object]:
    """Return the bytes that the file system serves, and seconds, both ways; a broadcast is a scatter and a ring."""
    blocks = math.ceil(num_bytes / BLOCK_BYTES)
    rounds = math.ceil(math.log2(num_nodes)) + num_nodes - 1
    broadcast = blocks * rounds * LATENCY_S + 2 * num_bytes * (num_nodes - 1) / num_nodes / link_rate
    return {
        "nodes": num_nodes,
        "read_gb_each": num_nodes * num_bytes / 1e9,
        "read_gb_one": num_bytes / 1e9,
        "seconds_each": max(num_nodes * num_bytes / read_rate, num_bytes / link_rate),
        "seconds_one": num_bytes / min(read_rate, link_rate) + broadcast,
    }


def main() -> None:
    """Measure, model and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--environment-gb", type=float, default=2.9)
    parser.add_argument("--read-gb", type=float, default=50.0)
    parser.add_argument("--link-gb", type=float, default=10.0)
    given = parser.parse_args()
    if problem := missing("hosts"):
        raise SystemExit(problem)
    rates = (given.environment_gb * 1e9, given.read_gb * 1e9, given.link_gb * 1e9)
    document = {
        "measured": measured(given.hosts, given.mib, given.rate),
        "modelled": [modelled(nodes, *rates) for nodes in MODELLED],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

"""Makes docs/example-report anew: a study on five lab hosts under Slurm, with two accidents, and its report.

`python -m tests.lab.example FOLDER` as root; FOLDER, which must not lie below /tmp, takes the study.
Called again after an interruption it goes on.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdl.cluster.status import read_statuses
from tests.conftest import ROOT, Finished
from tests.lab import hosts, needs, slurm
from tests.lab.hosts import wait_until
from tests.study.kept import keep

NODES, RATE, LINK, CORES = 5, "20mbit", "2.5MB", 0.4
MACHINE = "lab of five hosts: 0.4 cores and 20 Mbit/s each"
LONGEST_S = 1800.0


class Desk:
    """A user's folder on the lab's login host."""

    def __init__(self, lab: slurm.SlurmLab, folder: Path) -> None:
        self.lab, self.folder, self.study = lab, folder, folder / "example"

    def hpcdl(self, *words: str | Path) -> Finished:
        """Run hpcdl on the login host; RuntimeError where it fails."""
        environment = {
            "PYTHONPATH": str(ROOT),
            "HPCDL_MACHINE": MACHINE,
            "HPCDL_SITE_CONFIG": str(self.folder / "site.toml"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "UCX_TLS": "tcp,self",  # the hosts share a kernel: through its memory the network would be none
            "UCX_NET_DEVICES": "eth0",
        }
        line = [sys.executable, "-m", "hpcdl", *words]
        finished = self.lab.run(line, env=environment, cwd=self.folder, timeout_s=300)
        if finished.code:
            raise RuntimeError(finished.err)
        return finished

    def sweep(self) -> dict[int, dict[str, Any]]:
        """`hpcdl sweep --jobs`: the parts of the study, by their number of nodes."""
        file = ROOT / "docs" / "example-report" / "study.toml"
        resume = ["--resume"] if (self.study / "jobs.json").exists() else []
        told = self.hpcdl("sweep", file, "--jobs", "--time", "30m", "--out", "example", "--json", *resume)
        return {part["nodes"]: part for part in told.json()["jobs"]}

    def submit(self) -> dict[int, dict[str, Any]]:
        """The parts of the study, the jobs of all that are not finished waiting until they are released."""
        self._slurm("update", "PartitionName=main", "State=DOWN")
        parts = self.sweep()
        for part in parts.values():
            if part["job"] and self._waits(part):
                self._slurm("hold", str(part["job"]))
        self._slurm("update", "PartitionName=main", "State=UP")
        return parts

    def release(self, part: Mapping[str, Any]) -> None:
        """Let the job of a part begin."""
        if self._waits(part):
            self._slurm("release", str(part["job"]))

    def _waits(self, part: Mapping[str, Any]) -> bool:
        return self.lab.job(int(part["job"]))["JobState"] == "PENDING"

    def _slurm(self, *words: str) -> None:
        finished = self.lab.run(["scontrol", *words])
        if finished.code:
            raise RuntimeError(finished.err)

    def once(self, name: str) -> bool:
        """Whether accident `name` is still to happen; it is noted as having happened."""
        mark = self.folder / f"{name}.done"
        due = not mark.exists()
        mark.touch()
        return due

    def runs(self, part: str, status: str) -> list[str]:
        """Names of the runs of a part with `status`."""
        path = self.study / part / "study.json"
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
        return [run["name"] for run in runs if run["status"] == status]

    def records(self) -> dict[Path, bytes]:
        """The records of all runs that their sweeps know to be finished."""
        parts = [path.parent for path in self.study.glob("*/study.json")]
        names = [part / "runs" / name for part in parts for name in self.runs(part.name, "finished")]
        return {name / "record.json": (name / "record.json").read_bytes() for name in names}


def kill_a_rank(desk: Desk) -> None:
    """kill -9 of one rank of the first run of four nodes, while it trains."""
    running = desk.study / "4-nodes" / "runs"
    wait_until(lambda: any('"step"' in path.read_text() for path in running.glob("*/metrics.jsonl")), "steps", 900)
    (ranks,) = running.glob("*/ranks")
    rank = read_statuses(ranks)[1]
    desk.lab.run(["kill", "-9", str(rank.pid)], host=rank.host)
    print(f"killed rank 1 of {ranks.parent.name} on {rank.host}", flush=True)


def kill_a_sweep(desk: Desk, number: int) -> None:
    """kill -9 of the sweep of two nodes when two of its runs are done."""
    wait_until(lambda: len(desk.runs("2-nodes", "finished")) >= 2, "two runs are done", 900)
    host = desk.lab.job(number)["NodeList"].replace("[", "").replace("node", "").split(",")[0].split("-")[0]
    pid = desk.lab.run(["pgrep", "-o", "-f", "--", "--only-nodes 2 "], host=f"node{host}").out.strip()
    desk.lab.run(["kill", "-9", pid], host=f"node{host}")
    desk.lab.wait_for_job(number)
    print(f"killed the sweep of two nodes, with {len(desk.runs('2-nodes', 'finished'))} runs finished", flush=True)


def study(desk: Desk) -> None:
    """The study with its accidents, to the end; RuntimeError where a finished run was run again.

    One part after the other: ranks that start beside a run that is measured would take its processors.
    """
    before = desk.records()
    parts = desk.submit()
    print(f"{len(before)} runs kept; jobs of {[part['nodes'] for part in parts.values() if part['submitted']]} nodes")
    for nodes in sorted(parts, reverse=True):
        part = parts[nodes]
        if not part["job"]:
            continue
        desk.release(part)
        if nodes == 4 and desk.once("rank"):
            kill_a_rank(desk)
        if nodes == 2 and desk.once("sweep"):
            kill_a_sweep(desk, int(part["job"]))
            before |= desk.records()
            part = desk.submit()[nodes]
            desk.release(part)
        desk.lab.wait_for_job(int(part["job"]), timeout_s=LONGEST_S)
    left = [part for part in desk.sweep().values() if part["state"] != "finished"]
    if left:
        raise RuntimeError(f"not finished: {left}")
    after = desk.records()
    if any(after[path] != text for path, text in before.items()):
        raise RuntimeError("a finished run was run again")
    print(f"{len(after)} runs finished, {len(before)} of them kept from before the last interruption", flush=True)


def publish(desk: Desk) -> None:
    """Raw records and report into docs/example-report."""
    page = ROOT / "docs" / "example-report"
    keep(desk.study, page, [desk.folder, ROOT])
    desk.hpcdl("report", page / "study", "--out", page / "report", "--link", LINK)


def main() -> int:
    """Do it; the exit code."""
    folder = Path(sys.argv[1]).resolve()
    missing = needs.all_missing(("hosts", "slurm")) or ("" if folder.parts[1] != "tmp" else "FOLDER lies below /tmp")
    if missing:
        print(f"the lab cannot start: {missing}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    with hosts.lab_folder() as place:
        first_job = int(time.time()) % 10_000_000  # another time the numbers of an earlier cluster's jobs are unknown
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the hosts would stay
        lab = slurm.SlurmLab(place, num_nodes=NODES, rate=RATE, cores=CORES, first_job=first_job)
        try:
            lab.start()
            desk = Desk(lab, folder)
            study(desk)
            publish(desk)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # `timeout` sends it twice
            lab.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

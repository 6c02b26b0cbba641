"""Hosts on one machine: each has a network, name, processes, /tmp and /dev/shm of its own; a bridge joins them.

A host is the set of namespaces that one process holds; when that process is killed, everything on the host ends and the
kernel removes its network and mounts. Nothing is written outside the lab's folder, except control groups if hosts get a
share of the processors.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import ROOT, Finished, patience
from tests.lab import quota

USER, USER_ID = "student", 12345
"""The lab's unprivileged user, known on its hosts only."""
LOGIN = "login"
NETWORK = "10.77.0"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
ADDRESSES = {LOGIN: f"{NETWORK}.254", **{f"node{i}": f"{NETWORK}.{i}" for i in range(1, 65)}}

# The data in flight must not depend on this machine's TCP setting for the Internet: on a shared link BBR estimated half
# its rate. The kernel allows reno in every network. A folder below /tmp that must have the same path on a host is first
# bound into the host's /tmp.
_BOOT = """
set -eu
host=$1; own=$2; etc=$3; shift 3
for file in passwd group hosts; do mount --bind "$etc/$file" "/etc/$file"; done
mkdir -p "$own/tmp"; chmod 1777 "$own/tmp"
for shared in "$@"; do
    case $shared in /tmp/*) mkdir -p "$own$shared"; mount --rbind "$shared" "$own$shared";; esac
done
mount --rbind "$own/tmp" /tmp
mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
hostname "$host"
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
ip link set lo up
touch /tmp/.booted
sleep infinity & wait
"""


@dataclass
class Lab:
    """Hosts `login`, `node1`, ... in `folder`; `shared` is the file system that all of them see at the same path.

    `rate` (in tc's notation) is the rate of each host's link in each direction, `cores` the processors of each node;
    empty: all. With `delay_ms` a process is the switch (needs gcc), and a frame takes that long from host to host.
    """

    folder: Path
    num_nodes: int
    rate: str = ""
    cores: float = 0.0
    delay_ms: float = 0.0
    holders: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    inits: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Path] = field(default_factory=dict)
    shapes: int = 0

    @property
    def shared(self) -> Path:
        """The stand-in for the parallel file system."""
        return self.folder / "shared"

    @property
    def home(self) -> Path:
        """The user's home folder, on the shared file system."""
        return self.shared / "home" / USER

    @property
    def nodes(self) -> list[str]:
        """The compute nodes' names."""
        return [f"node{i}" for i in range(1, self.num_nodes + 1)]

    def start(self) -> None:
        """Boot the hosts and join them by a bridge; `rate` (in tc's notation) shapes each host's link."""
        self._write_etc()
        self.home.mkdir(parents=True)
        os.chown(self.home, USER_ID, USER_ID)
        for host in ("switch", LOGIN, *self.nodes):
            self._boot(host)
        if self.delay_ms:
            self._start_switch()
            return
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._on_switch("ip", "link", "set", "bridge", "up")
        for host in (LOGIN, *self.nodes):
            self._plug(host)

    def stop(self) -> None:
        """Kill every host by the process that holds it."""
        for host in list(self.holders):
            self.stop_host(host)

    def lose_host(self, host: str) -> None:
        """Cut one host's power: its peers hear nothing more of it, not even that its connections end."""
        self._on_switch("ip", "link", "set", f"to-{host}", "down")
        self.stop_host(host)

    def stop_host(self, host: str) -> None:
        """Stop one host: all its processes are killed at once, and their connections are closed."""
        holder, init = self.holders.pop(host), self.inits.pop(host, None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(init or holder.pid, signal.SIGKILL)
        holder.wait(timeout=300)
        if host in self.groups:
            quota.remove(self.groups.pop(host))

    def shape(self, host: str, rate: str) -> None:
        """Set the rate of the link of `host` (in tc's notation) in each direction, for hosts on the bridge.

        Packets in the link's queues are lost, and TCP sends them again. In a kept queue, a segment as long as the old
        rate's burst would block a shorter new burst forever, and all packets behind it.
        """
        self.shapes += 1  # an unused handle makes a new queue
        bucket = f"root handle {self.shapes:x}: tbf rate {rate} burst {_burst(rate)}".split()
        self._checked(self.run(["tc", "qdisc", "replace", "dev", "eth0", *bucket, "latency", "50ms"], host=host))
        # Many hosts may send to one: like a switch with deep buffers, keep what this host's link cannot take yet.
        self._on_switch("tc", "qdisc", "replace", "dev", f"to-{host}", *bucket, "limit", "32mb")

    def boot_again(self, host: str) -> None:
        """Boot a host that has ended, on an empty disk."""
        shutil.rmtree(self.folder / "hosts" / host)
        self._boot(host)
        self._plug(host)

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        host: str = LOGIN,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 240.0,
    ) -> Finished:
        """Run a command on `host` as `user`, in the environment of a fresh login shell."""
        line = self.command(arguments, host=host, user=user, env=env, cwd=cwd)
        finished = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, env={"PATH": os.defpath}
        )
        return Finished(finished.returncode, finished.stdout, finished.stderr)

    def change(self, line: str, *, host: str) -> None:
        """Run a line of shell as root on `host`; fail if it fails, because the test would then mean nothing."""
        finished = self.run(["sh", "-ec", line], host=host)
        assert finished.code == 0, f"{host}: {line}: {finished.err}"

    def command(
        self,
        arguments: Sequence[str | Path],
        *,
        host: str = LOGIN,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> list[str]:
        """Return the command line behind `run`, for tests that start it themselves."""
        home = self.home if user == USER else Path(pwd.getpwnam(user).pw_dir)
        environment = {
            "HOME": str(home),
            "USER": user,
            "LOGNAME": user,
            "PATH": SYSTEM_PATH,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **self.environment,
            **(env or {}),
        }
        enter = [
            "nsenter",
            "--target",
            str(self.inits[host]),
            "--all",
            f"--wd={cwd or (home if home.is_dir() else '/')}",
            "--",
        ]
        become = (
            []
            if user == "root"
            else [
                "/usr/bin/setpriv",
                f"--reuid={user}",
                f"--regid={user if user == USER else 'nogroup'}",
                "--init-groups",
            ]
        )
        assignments = [f"{name}={value}" for name, value in environment.items()]
        limit = quota.entering(self.groups[host]) if host in self.groups else []
        return [*limit, *enter, *become, "/usr/bin/env", "-i", *assignments, *map(str, arguments)]

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment of every command on every host."""
        return {}

    def _boot(self, host: str) -> None:
        own = self.folder / "hosts" / host
        own.mkdir(parents=True)
        seen = [str(self.shared), str(ROOT)]
        flags = ["--fork", "--pid", "--kill-child", "--mount-proc", "--net", "--uts", "--ipc", "--mount"]
        line = ["unshare", *flags, "bash", "-c", _BOOT, "boot", host, str(own), str(self.folder / "etc"), *seen]
        log = (own / "boot.log").open("wb")
        with log:
            # The caller's own PATH may lead below /tmp, which is another folder on the host.
            environment = {**os.environ, "PATH": SYSTEM_PATH}
            holder = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self.holders[host] = holder
        wait_until(lambda: (own / "tmp" / ".booted").exists() or holder.poll() is not None, f"{host} boots")
        if holder.poll() is not None:
            raise RuntimeError(f"{host} did not boot: {(own / 'boot.log').read_text()}")
        self.inits[host] = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
        if self.cores and host in self.nodes:
            self.groups[host] = quota.make_group(f"{self.folder.name}-{host}", self.cores)

    def _plug(self, host: str) -> None:
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(self.inits[host])]
        self._on_switch("ip", "link", "add", f"to-{host}", *pair)
        self._on_switch("ip", "link", "set", f"to-{host}", "master", "bridge", "up")
        self._address(host)
        if self.rate:
            self.shape(host, self.rate)

    def _address(self, host: str) -> None:
        for line in (f"ip addr add {ADDRESSES[host]}/24 dev eth0", "ip link set eth0 up"):
            self._checked(self.run(line.split(), host=host))

    def _start_switch(self) -> None:
        """Start the switch: the kernel limits rates but not delays, so a process forwards every frame."""
        program = self.folder / "switch"
        subprocess.run(["gcc", "-O2", "-o", str(program), str(ROOT / "tests" / "lab" / "switch.c")], check=True)
        inits = [str(self.inits[host]) for host in (LOGIN, *self.nodes)]
        line = [str(program), str(round(1000 * self.delay_ms)), str(megabits(self.rate)), *inits]
        switch = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        assert switch.stdout
        with switch.stdout as answer:
            if answer.readline() != b"ready\n":
                raise RuntimeError(f"the switch did not start: exit status {switch.wait(timeout=30)}")
        self.holders["wires"] = switch
        for host in (LOGIN, *self.nodes):
            self._address(host)

    def _on_switch(self, *line: str) -> None:
        # Only the network of the switch: process numbers must stay those of this machine.
        subprocess.run(["nsenter", "--target", str(self.inits["switch"]), "--net", "--", *line], check=True)

    def _write_etc(self) -> None:
        etc = self.folder / "etc"
        etc.mkdir(parents=True)
        self.shared.mkdir()
        shell = f"{USER}:x:{USER_ID}:{USER_ID}:a user of the lab:{self.home}:/bin/bash\n"
        (etc / "passwd").write_text(Path("/etc/passwd").read_text() + shell)
        (etc / "group").write_text(Path("/etc/group").read_text() + f"{USER}:x:{USER_ID}:\n")
        lines = [f"{address} {name}" for name, address in ADDRESSES.items()]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")

    @staticmethod
    def _checked(finished: Finished) -> None:
        if finished.code:
            raise RuntimeError(finished.err)


def megabits(rate: str) -> float:
    """Return a rate in tc's notation as megabits per second."""
    for unit, megabits in (("gbit", 1000.0), ("mbit", 1.0)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * megabits
    raise ValueError(f"rate {rate!r}: give mbit or gbit")


def _burst(rate: str) -> str:
    """Return what an idle link passes at once: little, or small models would be sent without delay.

    From half a gigabit on it is one segment as the kernel passes it on, which would otherwise be split: with 16 KB such
    a link carries a fifth of its rate if both its ends send.
    """
    return "72kb" if megabits(rate) >= 500 else "16kb"


def wait_until(condition: object, what: str, timeout_s: float = 120.0) -> None:
    """Return when `condition()` is true; raises TimeoutError, which names `what` did not happen in time."""
    allowed_s = patience(timeout_s)
    deadline = time.monotonic() + allowed_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {allowed_s:.0f} s in vain until {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def lab_folder() -> Iterator[Path]:
    """A new folder that every user can enter, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdl-lab-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

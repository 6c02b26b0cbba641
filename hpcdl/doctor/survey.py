"""One node's answer to `hpcdl doctor --nodes`: its facts, its speed in a test of a second, and its own checks.

`python -m hpcdl.doctor.survey` runs on each node and prints one mark per fact. Marks are short and independent, because
a launcher may cut the output of many nodes anywhere between them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcdl import __version__
from hpcdl.cluster.launchers.mpiexec import find_library
from hpcdl.core.errors import HpcdlError, printable
from hpcdl.data.write.lustre import file_system_of
from hpcdl.doctor.installation import installed_version
from hpcdl.doctor.table import OK, Subject, examine
from hpcdl.node.machines import read_topology

LOCAL_CHECKS = ("module", "affinity", "limits", "scratch", "shared-memory")
"""Checks of a node alone that are cheap enough for thousands of nodes at once."""
PACKAGES = ("tensorflow", "keras", "numpy", "h5py", "mpi4py")
MULTIPLY_S, COPY_S = 0.7, 0.3
MATRIX, COPIED_BYTES = 1024, 64 * 1024**2
LONGEST = 700
"""Most characters of one value, so that a mark passes through srun in one piece."""
_MARK = re.compile(r"<<hpcdl ([\w.-]+) (text|number|finding) ([\w-]+) (\"(?:[^\"\\]|\\.)*\"|[-+.\w]+)>>")


@dataclass(frozen=True, kw_only=True)
class NodeAnswer:
    """A node's answer: `texts` should be equal on all nodes, `numbers` similar; `findings` are problems.

    A finding is level, check, text and remedy.
    """

    host: str
    texts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[tuple[str, str, str, str], ...] = ()


def read_answers(printed: str) -> dict[str, NodeAnswer]:
    """Return every node's answer by host, whatever else the launcher printed."""
    by_host: dict[str, tuple[dict[str, str], dict[str, float], list[tuple[str, str, str, str]]]] = {}
    for host, kind, name, value in _MARK.findall(printed):
        texts, numbers, findings = by_host.setdefault(host, ({}, {}, []))
        if kind == "number":
            numbers[name] = float(value)
        elif kind == "text":
            texts[name] = printable(json.loads(value))
        else:
            level, check, text, remedy = (*map(printable, json.loads(value).split("\t")), "", "", "")[:4]
            findings.append((level, check, text, remedy))
    return {
        host: NodeAnswer(host=host, texts=texts, numbers=numbers, findings=tuple(findings))
        for host, (texts, numbers, findings) in sorted(by_host.items())
    }


def texts(data: Path | None) -> Iterator[tuple[str, str]]:
    """Yield facts that are equal on all nodes of a healthy job."""
    topology = read_topology()
    yield "kernel", platform.release()
    yield "processor", topology.summary.rpartition(", ")[0]
    yield "clock-rate", _first(Path("/sys/devices/system/cpu/cpu0/cpufreq"), "scaling_governor", "scaling_max_freq")
    yield "huge-pages", _first(Path("/sys/kernel/mm/transparent_hugepage"), "enabled")
    yield "python", f"{platform.python_version()}, libc {platform.libc_ver()[1]}"
    yield "hpcdl", f"{__version__} in {sys.prefix}"
    for name in PACKAGES:
        yield name, installed_version(name) or "missing"
    try:
        library, flavour, version = find_library()
        yield "mpi", f"{flavour} {version}, {library}"
    except HpcdlError as error:
        yield "mpi", str(error)
    yield "networks", "; ".join(networks(Path("/sys/class"))) or "none"
    yield "open-files", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield "locked-memory", str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield "folder", file_system_of(Path.cwd()).kind
    if data is not None:
        yield "data", file_system_of(data).kind if data.is_dir() else f"{data} is not there"


def networks(root: Path) -> Iterator[str]:
    """Yield each active network of this node: rate and packet size, or InfiniBand's own text; `root` is /sys/class."""
    for device in sorted((root / "net").glob("*")):
        if device.name != "lo" and _read(device / "operstate") in ("up", "unknown"):
            speed = _read(device / "speed")
            rate = f"{speed} Mbit/s, " if speed.isdigit() else ""
            yield f"{device.name} {rate}packets of {_read(device / 'mtu')}"
    for port in sorted((root / "infiniband").glob("*/ports/*")):
        state = _read(port / "state").rpartition(" ")[2].lower()
        yield f"{port.parents[1].name}/{port.name} {_read(port / 'rate')} {state}"


def numbers() -> Iterator[tuple[str, float]]:
    """Yield numbers that are similar on nodes of one kind; the two rates are measured, in one second together."""
    memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE))
    yield "memory-gib", int(memory["MemTotal"]) / 2**20
    yield "free-memory-gib", int(memory["MemAvailable"]) / 2**20
    yield "load", os.getloadavg()[0]
    yield "gflops", multiply_rate(MULTIPLY_S) / 1e9
    yield "copy-gib-s", copy_rate(COPY_S) / 2**30


def multiply_rate(seconds: float) -> float:
    """Return the floating-point operations per second of multiplying float32 matrices on all cores of this process."""
    import numpy

    left = numpy.ones((MATRIX, MATRIX), numpy.float32)
    # The first product starts the library's threads, and is not measured.
    result = left @ left
    return 2.0 * MATRIX**3 * _times_a_second(lambda: numpy.matmul(left, left, out=result), seconds)


def copy_rate(seconds: float) -> float:
    """Return the bytes per second that one core copies in memory."""
    import numpy

    source = numpy.ones(COPIED_BYTES, numpy.uint8)
    # A written target has its pages already, which the first copy would have to wait for.
    target = source.copy()
    return COPIED_BYTES * _times_a_second(lambda: numpy.copyto(target, source), seconds)


def _times_a_second(work: Callable[[], object], seconds: float) -> float:
    began_s, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began_s) < seconds or not done:
        work()
        done += 1
    return done / passed if passed else 0.0


def _first(folder: Path, *names: str) -> str:
    return ", ".join(filter(None, (_read(folder / name) for name in names))) or "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a link that is down has no speed; containers hide some files
        return ""


def marks(data: Path | None) -> Iterator[str]:
    """Yield this node's answer, in the form of `read_answers`."""
    # Slurm's name of the node, which `--exclude` takes, need not be its host name.
    host = os.environ.get("SLURMD_NODENAME") or platform.node()
    for name, text in texts(data):
        yield f"<<hpcdl {host} text {name} {json.dumps(text[:LONGEST])}>>"
    for name, number in numbers():
        yield f"<<hpcdl {host} number {name} {number:.6g}>>"
    for finding in examine(Subject(data=data), LOCAL_CHECKS):
        if finding.level != OK:
            text = "\t".join((finding.level, finding.check, finding.text, finding.remedy))
            yield f"<<hpcdl {host} finding {finding.check} {json.dumps(text[:LONGEST])}>>"


def main() -> None:
    """Print the answer of this node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(marks(parser.parse_args().data)), flush=True)


if __name__ == "__main__":
    main()

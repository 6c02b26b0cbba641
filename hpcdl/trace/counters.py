"""A rank's usage so far, by the kernel's counts: processor, switches, memory, network, files, clock rate."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import time
from pathlib import Path

CPU_US = "processor time (us)"
WAITED_US = "waiting for a processor (us)"
SWITCHES = "involuntary switches"
MEMORY = "memory (bytes)"
NETWORK = "network (bytes)"
READ = "read (bytes)"
CLOCK_KHZ = "clock rate (kHz)"
PROCESSORS = "processors allowed (thousandths)"
LEVELS = (MEMORY, CLOCK_KHZ, PROCESSORS)
"""Counters that are levels; all others only grow."""
_GROUPS = Path("/sys/fs/cgroup")
_MOST_TASKS = 64
"""Maximum number of threads whose waiting time is read, because each takes a system call or two."""
_MOST_PROCESSORS = 4


def sample() -> dict[str, int]:
    """Return the present counts, without those that this machine lacks."""
    counts = {CPU_US: cpu_us(), SWITCHES: resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw}
    reads = ((WAITED_US, _waited_us), (PROCESSORS, _processors), (MEMORY, _memory), (NETWORK, _network), (READ, _read))
    for name, read in reads:
        with contextlib.suppress(OSError, ValueError, IndexError):
            counts[name] = read()
    rate = _clock_khz()
    return counts if rate is None else {**counts, CLOCK_KHZ: rate}


def cpu_us() -> int:
    """Return the processor time of all threads so far, in microseconds."""
    return time.process_time_ns() // 1000


def _waited_us() -> int:
    """Return how long threads waited for a processor that others used, without the caller's own wait."""
    waited_ns = 0
    for task in itertools.islice(Path("/proc/self/task").iterdir(), _MOST_TASKS):
        if int(task.name) != threading.get_native_id():
            with contextlib.suppress(OSError):  # the thread has ended
                waited_ns += int((task / "schedstat").read_bytes().split()[1])  # nanoseconds of waiting for a CPU
    return waited_ns // 1000


def _processors() -> int:
    """Return the processors that the rank's binding and control group (version 1 or 2) allow, in thousandths."""
    most = float(len(os.sched_getaffinity(0)))
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one line without controllers (`0::/path`).
        if not controllers or "cpu" in controllers.split(","):
            group = _GROUPS / ("cpu" if controllers else "") / path.lstrip("/")
            with contextlib.suppress(OSError, ValueError):  # most groups have no quota
                most = min(most, _quota(group))
    return round(1000 * most)


def _quota(group: Path) -> float:
    """Return a group's quota in processors. Raises ValueError if there is none."""
    if (group / "cpu.max").exists():
        # Without a quota its text is `max`, from which float() below raises ValueError.
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
    else:
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
    if float(quota) < 0:  # the value for no quota in version 1
        raise ValueError(quota)
    return float(quota) / float(period)


def _memory() -> int:
    # The second field is the resident set, in pages.
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _network() -> int:
    """Return bytes in and out over all interfaces except the loopback."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() != "lo":
            fields = counts.split()
            total += int(fields[0]) + int(fields[8])  # the columns of bytes received and sent
    return total


def _read() -> int:
    fields = Path("/proc/self/io").read_text(encoding="ascii").split()
    # Not read_bytes, which is exact only for file systems on block devices (proc(5)).
    return int(fields[fields.index("rchar:") + 1])


def _clock_khz() -> int | None:
    """Return the mean rate of some of the rank's allowed processors; None if the kernel does not show it."""
    rates = []
    for number in sorted(os.sched_getaffinity(0))[:_MOST_PROCESSORS]:
        with contextlib.suppress(OSError, ValueError):
            rates.append(int(Path(f"/sys/devices/system/cpu/cpu{number}/cpufreq/scaling_cur_freq").read_bytes()))
    return sum(rates) // len(rates) if rates else None

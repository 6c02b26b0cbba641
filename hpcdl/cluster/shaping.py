"""A node's link at a lower rate, by `tc`: for faults on purpose, where the user may change the node's network.

What the node sends goes through a token bucket (tc-tbf(8)) as long as the process lives that asked for it: another one
takes the bucket away as soon as it is gone. A link that somebody has shaped already is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

DEVICES = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
_BURST_S, _LEAST_BURST = 0.004, 65536
"""Bytes that may leave at once: those of one tick of a slow kernel clock, and of one large packet."""
_TIMEOUT_S = 10.0
_AWAY = (
    "import os, signal, subprocess, sys, time\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
    "while os.path.exists(f'/proc/{sys.argv[1]}/fd'): time.sleep(0.1)\n"
    "subprocess.run(sys.argv[2:])\n"
)


def shape(bytes_per_s: float) -> str:
    """How this node's link is as slow as that from now on, in words; empty where tc cannot do it, or may not."""
    tc, device = shutil.which("tc"), _only_device()
    if tc is None or not device or any(INFINIBAND.glob("*")):
        return ""
    if any(" 0: " not in line for line in _output_of(tc, "qdisc", "show", "dev", device).splitlines()):
        return ""
    burst = max(_LEAST_BURST, int(bytes_per_s * _BURST_S))
    bucket = ("tbf", "rate", f"{bytes_per_s * 8:.0f}bit", "burst", f"{burst}b", "latency", "400ms")
    line = [sys.executable, "-P", "-S", "-c", _AWAY, str(os.getpid()), tc, "qdisc", "del", "dev", device, "root"]
    made = subprocess.run([tc, "qdisc", "add", "dev", device, "root", *bucket], capture_output=True, check=False)
    if made.returncode:
        return ""
    subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)
    return f"by tc on {device}"


def _output_of(*line: str) -> str:
    finished = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return finished.stdout


def _only_device() -> str:
    """The one network device that is up, but for the loopback; empty where there are several: which one counts?"""
    names = [path.name for path in DEVICES.iterdir()] if DEVICES.is_dir() else []
    up = [name for name in names if name != "lo" and _state(DEVICES / name) == "up"]
    return up[0] if len(up) == 1 else ""


def _state(device: Path) -> str:
    try:
        return (device / "operstate").read_text(encoding="ascii").strip()
    except OSError:
        return ""

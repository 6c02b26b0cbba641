"""Lustre: detect it, choose stripes for shards, set and read them with `lfs` from PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.units import format_bytes
from hpcdl.data.write.request import LayoutConfig

MOUNTS = Path("/proc/mounts")
STRIPE_BYTES = 1024**2
_STRIPE_UNIT = 64 * 1024  # Lustre takes multiples of this alone
_COUNTS = ((1024**3, 1), (10 * 1024**3, 8), (100 * 1024**3, 24))
"""OSTs advised up to each file size (NERSC); larger files get `_MOST_OSTS`."""
_MOST_OSTS = 72
_TIMEOUT_S = 60  # `lfs` waits for servers, also for those that are down


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """The file system of a folder: `kind` as in /proc/mounts, free bytes, number of Lustre's storage targets (OSTs)."""

    kind: str
    free_bytes: int
    num_osts: int | None = None

    @property
    def is_lustre(self) -> bool:
        """Whether it is Lustre."""
        return self.kind == "lustre"


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """The distribution of a file over OSTs: `count` -1 means all; `components` is 0 for a plain layout."""

    count: int
    size: int
    pool: str | None = None
    components: int = 0


def file_system_of(folder: Path, mounts: Path = MOUNTS) -> FileSystem:
    """Return the file system of `folder`, or of its nearest existing parent."""
    existing_folder = folder.absolute()
    while not existing_folder.exists():
        existing_folder = existing_folder.parent
    existing_folder = existing_folder.resolve()
    kind = _kind(existing_folder, mounts)
    free = os.statvfs(existing_folder)
    num_osts = _num_osts(existing_folder) if kind == "lustre" and shutil.which("lfs") else None
    return FileSystem(kind=kind, free_bytes=free.f_bavail * free.f_frsize, num_osts=num_osts)


def striping(file_system: FileSystem, file_bytes: int, layout: LayoutConfig, reasons: list[str]) -> Stripes | None:
    """Return the stripes of a shard of `file_bytes` on this file system; None if it sets no stripes."""
    options = [name for name in ("stripe_count", "stripe_size", "stripe_pool") if getattr(layout, name) is not None]
    if not file_system.is_lustre:
        if options:
            flags = ", ".join("--" + name.replace("_", "-") for name in options)
            raise UsageError(f"{flags}: the target is on {file_system.kind}, not on Lustre; leave it out")
        reasons.append(f"no stripes: {file_system.kind} is not Lustre")
        return None
    if not shutil.which("lfs"):
        reasons.append(
            "no stripes set: the target is Lustre, but there is no `lfs` on PATH; the folder's default holds"
        )
        return None
    size = layout.stripe_size or STRIPE_BYTES
    if size % _STRIPE_UNIT:
        raise UsageError(f"--stripe-size {size} is no multiple of 64KiB, which Lustre asks for")
    count = layout.stripe_count
    if count == 0:
        raise UsageError("--stripe-count 0 means nothing; give a number of OSTs, or -1 for all")
    why = "asked for"
    if count is None:
        count = advised_count(file_bytes)
        if file_system.num_osts:
            count = min(count, file_system.num_osts)
        why = f"advised for files of {format_bytes(file_bytes)}; many shards spread the load"
    pool = f" in pool {layout.stripe_pool}" if layout.stripe_pool else ""
    reasons.append(f"{'all' if count == -1 else count} OST(s) a shard{pool}, stripes of {format_bytes(size)}: {why}")
    return Stripes(count=count, size=size, pool=layout.stripe_pool)


def advised_count(file_bytes: int) -> int:
    """Return the advised number of OSTs for a file of this size."""
    return next((count for limit, count in _COUNTS if file_bytes < limit), _MOST_OSTS)


def setstripe_command(folder: Path, stripes: Stripes) -> list[str]:
    """Return the command that gives new files in `folder` these stripes."""
    pool = ["-p", stripes.pool] if stripes.pool else []
    return ["lfs", "setstripe", "-c", str(stripes.count), "-S", str(stripes.size), *pool, str(folder)]


def set_stripes(folder: Path, stripes: Stripes) -> None:
    """Set the default layout of `folder`, before the first shard is written into it."""
    _run(setstripe_command(folder, stripes))


def stripes_of(file: Path) -> Stripes:
    """Return the stripes of a file; for a composite layout, count and size of its last instantiated component."""
    components = int(_run(["lfs", "getstripe", "--component-count", str(file)]) or 0)
    count, size = (int(_run(["lfs", "getstripe", flag, str(file)])) for flag in ("-c", "-S"))
    return Stripes(count=count, size=size, components=components)


def _kind(path: Path, mounts: Path) -> str:
    """Return the type of the deepest mount that contains `path`."""
    best, kind = -1, "unknown"
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        # The kernel writes blanks and backslashes of a path in octal, as \040.
        mount = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        # Or equal: a later mount at the same point hides the earlier one.
        if (path == mount or mount in path.parents) and len(mount.parts) >= best:
            best, kind = len(mount.parts), fields[2]
    return kind


def _num_osts(path: Path) -> int | None:
    lines = _run(["lfs", "df", str(path)]).splitlines()
    return sum("[OST:" in line for line in lines) or None


def _run(command: list[str]) -> str:
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HpcdlError(f"`{' '.join(command)}` does not answer ({error}); ask the site's staff") from error
    if completed.returncode:
        reason = (completed.stderr.strip() or f"exit code {completed.returncode}").splitlines()[-1]
        raise HpcdlError(
            f"`{' '.join(command)}` failed: {reason}; leave the stripe options out, or ask the site's staff"
        )
    return completed.stdout.strip()

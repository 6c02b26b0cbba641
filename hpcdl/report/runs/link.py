"""What the network carries: as the user says it, or as `hpcdl bench allreduce --json` measured it."""

from __future__ import annotations

from pathlib import Path

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.files import read_json
from hpcdl.core.units import parse_bytes


def link_of(text: str) -> float:
    """Bytes per second of `12.5GB`, or of the file that `hpcdl bench allreduce --json` printed: its median link.

    UsageError where `text` is neither.
    """
    path = Path(text)
    if path.is_file():
        return _measured(path)
    try:
        found = float(parse_bytes(text))
    except ValueError as error:
        raise UsageError(f"--link: {error}; or name a file made by hpcdl bench allreduce --json") from None
    if found <= 0:
        raise UsageError(f"--link {text}: a network carries more than nothing; give bytes per second, such as 12.5GB")
    return found


def _measured(path: Path) -> float:
    try:
        cost = float(read_json(path)["link"]["seconds_per_byte"])
    except (CorruptError, KeyError, TypeError, ValueError):
        raise UsageError(f"--link {path} is not what hpcdl bench allreduce --json prints; make one with it") from None
    if not cost > 0:
        raise UsageError(f"--link {path}: its link's time does not grow with size; measure larger --sizes")
    return 1 / cost

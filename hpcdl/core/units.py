"""Bytes, seconds, rates, counts and sets of CPUs: numbers to text and back.

Sets of CPUs are written as people and kernels do: lists such as `0-3,8`, and hexadecimal masks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

IMAGES, SAMPLES = "images", "samples"
"""The unit that a run counts, also in its rate: images if each sample is an image with its class, else samples."""

_BYTES = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_SECONDS = {
    unit: Decimal(seconds)
    for unit, seconds in {"ms": "0.001", "": "1", "s": "1", "m": "60", "min": "60", "h": "3600", "d": "86400"}.items()
}
_NUMBER = r"(\d+(?:\.\d+)?)\s*([a-z]*)"


def parse_bytes(text: str) -> int:
    """Return the bytes in `text`: `256MiB`, `1.5GB`, `4096`. Raises ValueError otherwise."""
    match = re.fullmatch(_NUMBER, text.strip().lower())
    if not match or match[2] not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write for example 256MiB or 1.5GB")
    # Decimal: with floats, 8.2 GB loses a byte.
    return int(Decimal(match[1]) * _BYTES[match[2]])


def parse_size(text: str) -> int:
    """Return the bytes in `text`, as `parse_bytes`. ValueError for a small number without a unit: 64 may mean MiB."""
    num_bytes, word = parse_bytes(text), text.strip()
    if 0 < num_bytes < 1024 and not word[-1].isalpha():
        raise ValueError(f"{word} of which unit? Write {word}MiB, {word}KiB or, for bytes, {word}B")
    return num_bytes


def parse_seconds(text: str) -> float:
    """Return the seconds in `text`: `90`, `10m`, `1h30m`, `01:30:00`, `1-00:00:00`. Raises ValueError otherwise."""
    stripped = text.strip().lower()
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", stripped)
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    parts = re.findall(_NUMBER, stripped)
    rebuilt = re.sub(_NUMBER, "", stripped).strip()
    if not parts or rebuilt or any(unit not in _SECONDS for _, unit in parts):
        raise ValueError(f"{text!r} is not a time; write for example 90s, 10m, 1h30m or 01:30:00")
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in parts))


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in the largest binary unit that keeps it above one: `25 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return _short(value, unit)
        value /= 1024
    return _short(value, "TiB")


def format_seconds(seconds: float) -> str:
    """Return `seconds` as a person would say it: `3.2 ms`, `4.5 s`, `12m 05s`, `3h 20m`."""
    if abs(seconds) < 1e-9:  # a difference of clocks that is only rounding
        return "0 ms"
    if abs(seconds) < 1:
        return _short(seconds * 1e3, "ms")
    if seconds < 60:
        return _short(seconds, "s")
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest_s:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


NOT_BOUNDED = "not bounded"
LARGEST_FACTOR = 100.0
"""Ends of an interval that differ by a larger factor tell nothing: ten times less is as likely as ten times more."""


def is_bounded(low: float, high: float) -> bool:
    """Return whether an interval of a positive value is narrow enough to tell something about it."""
    return high <= LARGEST_FACTOR * low


def format_half_width(share: float | None) -> str:
    """Return the half width of an interval as a share of the value: `45 %`; None is one that tells nothing."""
    return "more than 1,000 %" if share is None else f"{100 * share:.0f} %"


def format_seconds_interval(middle: float, low: float, high: float) -> str:
    """Return the ends of an interval in the unit that `format_seconds` uses for its middle: `[263, 274]` of 268 ms."""
    if not is_bounded(low, high):
        return NOT_BOUNDED
    if middle < 1:
        return f"[{_three_digits(1e3 * low)}, {_three_digits(1e3 * high)}]"
    if middle < 60:
        return f"[{_three_digits(low)}, {_three_digits(high)}]"
    return f"[{format_seconds(low)}, {format_seconds(high)}]"


def _three_digits(value: float) -> str:
    """Return three significant digits without powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_count(count: float) -> str:
    """Return `count` with thousands separators: `431,080`."""
    return f"{count:,.0f}"


def common_unit(counted: Iterable[str]) -> str:
    """Return the common unit of runs that count these: `images` if all do, else `samples`, which include images."""
    return IMAGES if all(unit == IMAGES for unit in counted) else SAMPLES


def format_measure(value: float) -> str:
    """Return a loss or a metric with four decimals: `0.5000`; with three digits where they would show too little."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"


def format_rate(per_second: float, counted: str) -> str:
    """Return a rate of what is `counted` (IMAGES, SAMPLES) with three significant digits: `1,240 images/s`."""
    return f"{float(f'{per_second:.3g}'):,g} {common_unit([counted])}/s"


def _short(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.3g} {unit}"


def counted(count: int, unit: str) -> str:
    """Return `1 run`, `3 runs`."""
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names of many: `a, b, c and 9 more`."""
    shown = list(names[:most])
    num_hidden = len(names) - len(shown)
    return ", ".join(shown) + (f" and {num_hidden:,} more" if num_hidden else "")


MOST_CPUS = 65_536
"""More than any node has: a list that names more is damaged."""


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list such as `0-3,8`, ascending; empty text gives none. Raises ValueError."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        first, _, last = part.strip().partition("-")
        if int(last or first) >= MOST_CPUS:  # before `range`: a damaged list could name billions
            raise ValueError(f"no node has a CPU {last or first}")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def format_list(numbers: Iterable[int]) -> str:
    """Return `numbers` as the shortest kernel list: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_mask(text: str) -> tuple[int, ...]:
    """Return the bits of an hwloc mask: hexadecimal words of 32 bits, the highest first, empty words meaning 0."""
    value = 0
    for word in text.strip().split(","):
        value = (value << 32) | int(word or "0", 16)
        if not 0 <= value < 1 << MOST_CPUS:  # in the loop: a damaged mask would grow without a limit
            raise ValueError("no node has that many CPUs")
    return tuple(bit for bit in range(value.bit_length()) if value >> bit & 1)


def format_mask(numbers: Iterable[int]) -> str:
    """Return `numbers` as one hexadecimal mask, as `taskset` takes it: `0xff`."""
    return hex(sum(1 << number for number in set(numbers)))

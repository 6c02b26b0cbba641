"""Sets of CPUs as people and kernels write them: lists such as `0-3,8`, and hexadecimal masks."""

from __future__ import annotations

from collections.abc import Iterable

MOST_CPUS = 65_536
"""More than any node has: a list that names more is damaged."""


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list such as `0-3,8`, ascending; an empty text is the empty set. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        first, _, last = part.strip().partition("-")
        if int(last or first) >= MOST_CPUS:
            raise ValueError(f"no node has a CPU {last or first}")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def format_list(numbers: Iterable[int]) -> str:
    """`numbers` as the shortest kernel list: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_mask(text: str) -> tuple[int, ...]:
    """The bits of an hwloc mask: hexadecimal words of 32 bits, the highest first, empty words meaning 0."""
    value = 0
    for word in text.strip().split(","):
        value = (value << 32) | int(word or "0", 16)
        if not 0 <= value < 1 << MOST_CPUS:
            raise ValueError("no node has that many CPUs")
    return tuple(bit for bit in range(value.bit_length()) if value >> bit & 1)


def format_mask(numbers: Iterable[int]) -> str:
    """`numbers` as one hexadecimal mask, as `taskset` takes it: `0xff`."""
    return hex(sum(1 << number for number in set(numbers)))

"""The values of `--compress` and `--trace`, parsed from short texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcdl.core.errors import shown
from hpcdl.core.units import format_bytes, parse_bytes

NONE = "none"
PLAIN = (NONE, "fp16", "bf16")
"""Number formats: every value is sent, rounded or not."""
WITH_REST = ("int8", "topk", "powersgd")
"""Compression of gradients that leaves a rest, which is added to the next gradient."""
BY_BLOCK = ("int8", "fp4")
"""Compression of weight changes in few bits, with a scale for each block."""
TYPED = (*PLAIN, "int8", "fp4", "topk:1%", "powersgd:4")
"""All forms, as a user types them."""
_PERCENT = re.compile(r"topk:(\d{1,3}(?:\.\d{1,6})?)%")
_RANK = re.compile(r"powersgd:(\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A compression of what is sent; `text` is its shortest spelling.

    topk sends `percent` of the values, powersgd sends matrices of this `rank`.
    """

    kind: str = NONE
    text: str = NONE
    percent: float = 100.0
    rank: int = 0

    @property
    def keeps_rest(self) -> bool:
        """Whether a worker keeps the part of gradients that was not sent for the next step (error feedback)."""
        return self.kind in WITH_REST


def parse_compression(value: Any) -> Compression:
    """Parse `int8`, `topk:1%` or `powersgd:4`. Raises ValueError with the possible forms."""
    text = str(value).strip()
    if text in (*PLAIN, *BY_BLOCK):
        return Compression(kind=text, text=text)
    if match := _PERCENT.fullmatch(text):
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise ValueError(f"{shown(value)} is out of range; the share is above 0% and at most 100%")
        # Nine digits are all that the pattern accepts, so the text loses nothing.
        return Compression(kind="topk", text=f"topk:{percent:.9g}%", percent=percent)
    if match := _RANK.fullmatch(text):
        rank = int(match[1])
        if rank < 1:
            raise ValueError(f"{shown(value)} is out of range; the rank is at least 1")
        return Compression(kind="powersgd", text=f"powersgd:{rank}", rank=rank)
    for kind, form in (("topk", "topk:P%, such as topk:1%"), ("powersgd", "powersgd:R, such as powersgd:4")):
        if text.partition(":")[0] == kind:
            raise ValueError(f"{shown(value)} does not say how much; write {form}")
    raise ValueError(f"{shown(value)} is not one of {', '.join(TYPED)}")


OFF, STEPS, FULL = "off", "steps", "full"
LEVELS = (OFF, STEPS, FULL)
"""Levels: nothing; the parts of a step, its buckets, and the work between steps; also every message."""
UNASKED = "steps,ranks=0-15,size=1MiB"
"""The trace of every run by default: about its last two thousand steps, in few files."""
DEFAULT_BYTES = 64 << 20
LEAST_BYTES = 1 << 20
MOST_BYTES = 16 << 30
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_STEPS = re.compile(r"(\d{1,15})(?::(\d{1,15}))?")


@dataclass(frozen=True, kw_only=True)
class TraceSpec:
    """A requested trace. `ranks` are pairs of first and last; empty means all ranks.

    The steps from `first` up to but not including `end` are kept, and every `every`-th step; with neither, all steps.
    """

    level: str = OFF
    first: int | None = None
    end: int | None = None
    every: int | None = None
    ranks: tuple[tuple[int, int], ...] = ()
    num_bytes: int = DEFAULT_BYTES

    def has_rank(self, rank: int) -> bool:
        """Return whether `rank` is traced."""
        return self.level != OFF and (not self.ranks or any(first <= rank <= last for first, last in self.ranks))

    def has_step(self, step: int) -> bool:
        """Return whether the spans of `step` are kept."""
        if self.first is None and self.every is None:
            return True
        within = self.first is not None and self.first <= step and (self.end is None or step < self.end)
        return within or (self.every is not None and step % self.every == 0)

    @property
    def text(self) -> str:
        """The shortest text with the same meaning."""
        parts = [self.level]
        if self.first is not None:
            parts.append(f"steps={self.first}:{self.end}" if self.end is not None else f"steps={self.first}")
        parts += [f"every={self.every}"] if self.every is not None else []
        if self.ranks:
            parts.append("ranks=" + "+".join(f"{a}-{b}" if b > a else str(a) for a, b in self.ranks))
        if self.num_bytes != DEFAULT_BYTES:
            parts.append(f"size={format_bytes(self.num_bytes).replace(' ', '')}")
        return ",".join(parts)


def is_trace_spec(text: str) -> bool:
    """Return whether `text` looks like a value of --trace, valid or not, rather than the next word of a command."""
    return text in LEVELS or re.match(rf"[a-z]+=|({'|'.join(LEVELS)}),", text) is not None


def parse_trace(value: Any) -> TraceSpec:
    """Parse `steps=100:110,every=50,ranks=0-7`. Raises ValueError with the possible forms."""
    if isinstance(value, bool):
        # A flag without a value, or true in a settings file.
        return TraceSpec(level=STEPS if value else OFF)
    fields: dict[str, Any] = {"level": STEPS}
    key = ""
    for part in str(value).split(","):
        name, equals, text = part.strip().partition("=")
        if not equals and name in LEVELS:
            fields["level"] = name
        elif not equals and key == "ranks" and _RANGE.fullmatch(name):  # ranks=0-3,8
            fields["ranks"] = (*fields["ranks"], *_ranks(name)["ranks"])
        elif equals and name in _READERS:
            key = name
            fields |= _READERS[name](text)
        else:
            raise ValueError(
                f"{shown(part.strip())} is not part of a trace; write a level ({', '.join(LEVELS)}), steps=100:110, "
                "every=50, ranks=0-7 or size=64MiB, with commas between"
            )
    return TraceSpec(**fields)


def _steps(text: str) -> dict[str, Any]:
    match = _STEPS.fullmatch(text)
    if match is None or (match[2] is not None and int(match[2]) <= int(match[1])):
        raise ValueError(f"steps={text} is not a range; write steps=100:110 (100 to 109) or steps=100 (and all after)")
    return {"first": int(match[1]), "end": int(match[2]) if match[2] is not None else None}


def _every(text: str) -> dict[str, Any]:
    if not re.fullmatch(r"\d{1,15}", text) or int(text) < 1:
        raise ValueError(f"every={text} is not a number of steps; write every=50")
    return {"every": int(text)}


def _ranks(text: str) -> dict[str, Any]:
    matches = [_RANGE.fullmatch(part) for part in text.split("+")]
    pairs = [(int(match[1]), int(match[2] or match[1])) for match in matches if match is not None]
    if len(pairs) < len(matches) or any(last < first for first, last in pairs):
        raise ValueError(f"ranks={text} is not a list of ranks; write ranks=0-7 or ranks=0+8+16-23")
    return {"ranks": tuple(pairs)}


def _size(text: str) -> dict[str, Any]:
    num_bytes = parse_bytes(text)
    if not LEAST_BYTES <= num_bytes <= MOST_BYTES:
        raise ValueError(f"size={text} is out of range; a rank's trace takes 1MiB to 16GiB")
    return {"num_bytes": num_bytes}


_READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "steps": _steps,
    "every": _every,
    "ranks": _ranks,
    "size": _size,
}

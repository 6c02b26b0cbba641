"""What `--compress` asks for: in which form gradients, or changes of weights, travel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpcdl.core.errors import shown

NONE = "none"
PLAIN = (NONE, "fp16", "bf16")
"""Number formats: every value travels, rounded or not."""
WITH_REST = ("int8", "topk", "powersgd")
"""Kinds of gradients that leave something over, which the next gradient takes along."""
BY_BLOCK = ("int8", "fp4")
"""Kinds of changes of weights in few bits, with a scale for each block."""
TYPED = (*PLAIN, "int8", "fp4", "topk:1%", "powersgd:4")
"""All of them, as one types them."""
_PERCENT = re.compile(r"topk:(\d{1,3}(?:\.\d{1,6})?)%")
_RANK = re.compile(r"powersgd:(\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A form of what travels; `text` is the shortest word for it.

    Of topk `percent` of the values travel, of powersgd matrices of this `rank`.
    """

    kind: str = NONE
    text: str = NONE
    percent: float = 100.0
    rank: int = 0

    @property
    def keeps_rest(self) -> bool:
        """Whether a worker keeps what did not travel of gradients, for the next step (error feedback)."""
        return self.kind in WITH_REST


def parse_compression(value: Any) -> Compression:
    """The form that `int8`, `topk:1%` or `powersgd:4` asks for; ValueError says what is possible."""
    text = str(value).strip()
    if text in (*PLAIN, *BY_BLOCK):
        return Compression(kind=text, text=text)
    if found := _PERCENT.fullmatch(text):
        percent = float(found[1])
        if not 0 < percent <= 100:
            raise ValueError(f"{shown(value)} is out of range; the share is above 0% and at most 100%")
        return Compression(kind="topk", text=f"topk:{percent:.9g}%", percent=percent)
    if found := _RANK.fullmatch(text):
        rank = int(found[1])
        if rank < 1:
            raise ValueError(f"{shown(value)} is out of range; the rank is at least 1")
        return Compression(kind="powersgd", text=f"powersgd:{rank}", rank=rank)
    for kind, form in (("topk", "topk:P%, such as topk:1%"), ("powersgd", "powersgd:R, such as powersgd:4")):
        if text.partition(":")[0] == kind:
            raise ValueError(f"{shown(value)} does not say how much; write {form}")
    raise ValueError(f"{shown(value)} is not one of {', '.join(TYPED)}")

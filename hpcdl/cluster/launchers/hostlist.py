"""Host lists as schedulers write them: `c401-[001-004,010],login1` names six hosts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hpcdl.core.errors import UsageError

MAX_HOSTS = 100_000
"""More than any machine has: a list that names more is a slip, and would fill the memory."""

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts that `text` names, in its order; UsageError shows what cannot be read.

    Items are separated by commas, blanks or line ends. Each may hold any number of brackets with numbers and ranges;
    numbers keep the width of a range's first one, so that `[08-10]` gives 08, 09, 10.
    """
    rest = _ITEM.sub("", text)
    if re.sub(r"[,\s]", "", rest):
        raise UsageError(f"host list {text!r} has an unmatched bracket; write it like c401-[001-004,010],login1")
    hosts: list[str] = []
    for item in _ITEM.findall(text):
        remaining = MAX_HOSTS - len(hosts)
        found = list(itertools.islice(_hosts_of(item), remaining + 1))
        if len(found) > remaining:
            raise UsageError(f"host list {text[:60]!r} names more than {MAX_HOSTS} hosts; check its ranges")
        hosts += found
    return hosts


def _hosts_of(item: str) -> Iterator[str]:
    """The hosts of one item: every combination of its brackets, the last one running fastest."""
    head, bracket, tail = item.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = tail.partition("]")
    for number in _numbers(inside, item):
        for ending in _hosts_of(tail):
            yield f"{head}{number}{ending}"


def _numbers(inside: str, item: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise UsageError(
                f"host list item {item!r} has {part!r} in brackets; numbers and ranges like 001-004 go there"
            )
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"host list item {item!r} has the range {part!r}, which runs backwards; swap its ends")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))

"""Whether the ranks number words and classes alike: in the order of a rank's own samples each would have its own.

Nothing else would show it: inputs and targets have the right types and ranges, and the loss may even fall.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcdl.scripts.process.session import warn_once

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup

_MOST_WORDS = 1_000_000
_MOST_COMPARED = 1000
_FEW = 8
"""Words of a dictionary that may be a rank's place among the others, if one is called so."""
_NOT_THE_SCRIPT = ("hpcdl", "keras", "tensorflow", "runpy", "importlib")
_OF_SCIKIT_LEARN = ("classes_", "vocabulary_")
"""Where LabelEncoder, CountVectorizer and TfidfVectorizer keep what they have numbered."""


def check_numbering(group: ScriptGroup) -> None:
    """Warn if a dictionary or encoder of the calling script numbers a word or class otherwise on a rank. Collective."""
    local = dict(_numberings())
    digests = {name: _digest(numbers) for name, numbers in local.items()}
    by_rank = group.messages.allgather_json(digests)
    for name, digest in by_rank[0].items():
        others = [one.get(name) for one in by_rank[1:]]
        if None in others or set(others) == {digest}:
            continue
        # The same words on all ranks, whatever else each has.
        words = sorted(local[name], key=lambda word: (_number_of(word), word))[:_MOST_COMPARED]
        compared = group.messages.allgather_json({word: local[name][word] for word in words})
        if text := _verdict(name, compared):
            warn_once(group, f"numbers of {name}", text)


def _verdict(name: str, by_rank: list[dict[str, int]]) -> str:
    """Return the warning that numbers of words on the ranks deserve, or nothing."""
    first, *others = by_rank
    for rank, other in enumerate(others, 1):
        for word, number in first.items():
            if other.get(word, number) != number:
                return (
                    f"{name} numbers {word!r} {number} on rank 0 and {other[word]} on rank {rank}, so that one model "
                    "gets numbers of different meaning; number the words of all data in sorted order "
                    "(hpcdl.allgather_object gives those of all ranks)"
                )
    return ""


def _numberings() -> Iterator[tuple[str, Mapping[str, int]]]:
    """Return what numbers words among the variables of the functions that called, the script's own, by name."""
    seen = set[str]()
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_SCRIPT:
            for name, value in list(frame.f_locals.items()):
                numbers = None if name in seen else _numbers_in(value)
                if numbers is not None:
                    seen.add(name)
                    yield name, numbers
        frame = frame.f_back


def _numbers_in(value: Any) -> Mapping[str, int] | None:
    """Return words and their numbers, from 0 or 1 on without gaps, if that is what a variable holds."""
    if str(type(value).__module__).partition(".")[0] == "sklearn":
        held = getattr(value, "__dict__", {})
        value = next((held[name] for name in _OF_SCIKIT_LEARN if name in held), None)
        if hasattr(value, "tolist"):
            value = {str(word): number for number, word in enumerate(value.tolist())}
    if not isinstance(value, dict) or not 1 < len(value) <= _MOST_WORDS:
        return None
    # One pair tells nearly always, so that the others of a large dictionary are not looked at.
    word, number = next(iter(value.items()))
    if not isinstance(word, str) or type(number) is not int:
        return None
    if not all(isinstance(word, str) and type(number) is int for word, number in value.items()):
        return None
    if any("rank" in word for word in value if len(value) <= _FEW):
        return None
    least = min(value.values())
    return value if least in (0, 1) and {*value.values()} == {*range(least, least + len(value))} else None


def _digest(numbers: Mapping[str, int]) -> int:
    return sum(_number_of(f"{number} {word}") for word, number in numbers.items())


def _number_of(text: str) -> int:
    return zlib.crc32(text.encode(errors="surrogatepass"))  # names of files may be no UTF-8

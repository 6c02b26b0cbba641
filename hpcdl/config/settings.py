"""The declaration of a setting: a dataclass field with a sentence of help and a parser for text."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hpcdl.config.forms import parse_compression, parse_trace
from hpcdl.core.errors import shown
from hpcdl.core.units import format_bytes, format_seconds, parse_bytes, parse_seconds

REQUIRED = dataclasses.MISSING
LARGEST = 2**63 - 1  # TOML's integers have 64 bits
LONGEST_S = 1e9
ALLOCATORS = ("default", "glibc-tuned", "glibc-huge", "jemalloc", "tcmalloc")
"""Memory allocators: the system's, the same with larger blocks or huge pages, and libraries that replace it."""
AUTO = "auto"
"""The value of an `interval`, a `count` or an `amount` that the run itself chooses."""
LONGEST_NAME = 255
"""The most bytes that file systems accept in a name."""
_BETWEEN = re.compile(r"(?<!\\),")
LONGEST_SIDE = 65_535
"""The longest side of an image in JPEG."""


class Matters(enum.Flag):
    """What a change of a setting affects: report groups by it, sweep and search vary it, `--resume` refuses it."""

    NOTHING = 0
    RESULT = enum.auto()
    """What is computed, even in the last bit: `--resume` refuses another value."""
    EXTENT = enum.auto()
    """How far a run goes and on how many ranks: `--resume` accepts another value, and the run stays correct."""
    TIME = enum.auto()
    """What a step does or sends: runs that differ never share a curve."""
    REPEAT = enum.auto()
    """The difference between repeats of one setting: never a reason to separate runs."""


NOTHING, RESULT, EXTENT = Matters.NOTHING, Matters.RESULT, Matters.EXTENT
TIME, REPEAT = Matters.TIME, Matters.REPEAT


def setting(
    default: Any,
    help: str,
    *,
    kind: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] = (),
    matters: Matters | None = None,
) -> Any:
    """Declare a dataclass field: `help` is one sentence, `kind` overrides its type. Settings of a run give `matters`.

    Kinds beside types: `bytes`, `amount` (bytes, or AUTO), `seconds`, `interval` (seconds, or AUTO), `count` (a whole
    number, or AUTO), `size`, `accuracy`, `trace`, `compression`, and the lists `counts` (whole numbers from 1 on),
    `names`, and `words` (each unchanged, including commas).
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most}
    metadata = {"help": help, "kind": kind, "limits": limits, "choices": tuple(choices), "matters": matters}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One declared setting; `key` is the flag's name without leading dashes."""

    name: str
    key: str
    kind: str
    help: str
    default: Any
    optional: bool
    limits: dict[str, float | None]
    choices: tuple[str, ...]
    matters: Matters | None

    @property
    def required(self) -> bool:
        """Whether the user must give it."""
        return self.default is REQUIRED

    def parse(self, value: Any) -> Any:
        """Return the typed value of `value` (flag text or TOML value). Raises ValueError with what is possible."""
        # `show` writes an unset value as "none", which can therefore be typed too.
        if value is None or (self.optional and value in ("", "none")):
            if self.optional:
                return None
            raise ValueError("a value is needed")
        parsed = PARSERS[self.kind](value)
        if self.choices and parsed not in self.choices:
            raise ValueError(f"{shown(value)} is not one of {', '.join(self.choices)}")
        self._check_limits(parsed)
        return parsed

    def _check_limits(self, value: Any) -> None:
        # Limits hold for numbers; the parser of each kind says whether AUTO is possible.
        if value == AUTO:
            return
        tests: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
            "at_least": ("at least", lambda given, bound: given >= bound),
            "above": ("above", lambda given, bound: given > bound),
            "at_most": ("at most", lambda given, bound: given <= bound),
        }
        for name, (phrase, holds) in tests.items():
            bound = self.limits[name]
            if bound is not None and not holds(value, bound):
                raise ValueError(f"{value} is out of range; it must be {phrase} {bound:g}")

    def show(self, value: Any) -> str:
        """Return `value` as a user would type it."""
        if value is None:
            return "none"
        if self.kind == "size":
            return "x".join(str(side) for side in value)
        writers: dict[str, Callable[[Any], str]] = {
            "bytes": lambda number: format_bytes(number).replace(" ", ""),
            "amount": lambda number: number if number == AUTO else format_bytes(number).replace(" ", ""),
            **dict.fromkeys(("seconds", "limit"), lambda number: format_seconds(number).replace(" ", "")),
            "interval": lambda number: number if number == AUTO else format_seconds(number).replace(" ", ""),
            "bool": lambda flag: "true" if flag else "false",
            "counts": lambda numbers: ",".join(map(str, numbers)),
            "shares": lambda shares: ",".join(map(str, shares)),
            "names": lambda names: ",".join(name.replace(",", r"\,") for name in names),
            "words": " ".join,
        }
        return writers.get(self.kind, str)(value)


@functools.cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return the settings that the dataclass `cls` declares, in order."""
    hints = get_type_hints(cls)
    settings = []
    for declared in dataclasses.fields(cls):
        if "help" not in declared.metadata:
            continue
        names = _type_names(hints[declared.name])
        settings.append(
            Setting(
                name=declared.name,
                key=declared.name.replace("_", "-"),
                kind=declared.metadata["kind"] or next(name for name in names if name != "NoneType"),
                help=declared.metadata["help"],
                default=declared.default,
                optional="NoneType" in names,
                limits=declared.metadata["limits"],
                choices=declared.metadata["choices"],
                matters=declared.metadata["matters"],
            )
        )
    return tuple(settings)


def _type_names(hint: Any) -> list[str]:
    parts = getattr(hint, "__args__", None)
    return [part.__name__ for part in parts] if parts else [hint.__name__]


def _integer(value: Any) -> int:
    try:
        number = int(value)
        # bool is a subclass of int: TOML's `true` would count as 1.
        if isinstance(value, bool) or (isinstance(value, float) and value != number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{shown(value)} is not a whole number") from None
    return _within(number)


def _within(number: int) -> int:
    if abs(number) > LARGEST:
        raise ValueError(f"it is out of range; whole numbers end at {LARGEST}")
    return number


def _real(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{shown(value)} is not a number") from None
    # float() also reads "nan" and "inf", which pass every comparison with a limit or none.
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _bytes(value: Any) -> int:
    return _within(value if isinstance(value, int) and not isinstance(value, bool) else parse_bytes(str(value)))


def _amount(value: Any) -> int:
    try:
        return _bytes(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO}") from None


def _seconds(value: Any) -> float:
    number = _real(value) if isinstance(value, int | float) else parse_seconds(str(value))
    if number > LONGEST_S:
        raise ValueError(f"{shown(value)} is out of range; no time is longer than {LONGEST_S:g} s")
    return number


def _time_limit(value: Any) -> float:
    """Return the seconds of a job's limit; a number alone is refused: it means minutes in most systems."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+", number := value.strip()):
        raise ValueError(f"{number} is minutes under Slurm, and seconds under PBS; write {number}m or {number}s")
    return _seconds(value)


def _boolean(value: Any) -> bool:
    values = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() in values:
        return values[str(value).lower()]
    raise ValueError(f"{shown(value)} is neither true nor false")


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{shown(value)} is not text")
    text = str(value)
    if "\0" in text or max(map(len, os.fsencode(text).split(b"/"))) > LONGEST_NAME:
        raise ValueError(f"{shown(text)} holds a zero byte, or a name of more than {LONGEST_NAME} bytes")
    try:
        # File names that are not UTF-8 arrive with surrogates, which neither TOML nor JSON can hold.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(text)} is not UTF-8; give it such a name, or link to it under one") from None
    return text


def accuracy(value: Any) -> float:
    """Return an accuracy, as a share, from `98%` or `0.98`. Raises ValueError for 98, which may be either."""
    text = str(value).strip()
    number = _real(text.removesuffix("%") if text.endswith("%") else value)
    share = number / 100 if text.endswith("%") else number
    if not 0 < share <= 1 or (share < _LEAST_PERCENT and text.endswith("%")):
        raise ValueError(f"{shown(value)} is no accuracy; write for example 98% or 0.98")
    return share


_LEAST_PERCENT = 0.01
"""Below it, `0.98%` may mean 98 %."""


def image_size(value: Any) -> tuple[int, int]:
    """Return height and width from `28`, `224x192` or a list of two numbers."""
    parts = value if isinstance(value, list | tuple) else str(value).lower().split("x")
    try:
        sides = [_integer(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or not 1 <= min(sides) <= max(sides) <= LONGEST_SIDE:
        raise ValueError(f"{shown(value)} is not a size; write for example 28 or 224x192, up to {LONGEST_SIDE}")
    return sides[0], sides[-1]


def _items(value: Any) -> list[Any]:
    """Return the parts of `a,b`, of a list, or of a single value; `\\,` is a comma within a part."""
    is_list = isinstance(value, list | tuple)
    items = list(value) if is_list else [part.replace(r"\,", ",") for part in _BETWEEN.split(str(value))]
    items = [item.strip() if isinstance(item, str) else item for item in items]
    if not items or "" in items or any(isinstance(item, list | dict) for item in items):
        raise ValueError(f"{shown(value)} is not a list; write one or more values, separated by commas")
    return items


def _counts(value: Any) -> tuple[int, ...]:
    numbers = tuple(_integer(item) for item in _items(value))
    if min(numbers) < 1:
        raise ValueError(f"{min(numbers)} is out of range; each must be at least 1")
    return numbers


def _shares(value: Any) -> tuple[int | str, ...]:
    """Parse counts, or shares of the workers such as `workers/8`."""
    return tuple(_share(item) for item in _items(value))


def _share(item: Any) -> int | str:
    match = re.fullmatch(r"workers\s*/\s*(\d+)", item) if isinstance(item, str) else None
    if match and int(match[1]) > 0:
        return f"workers/{int(match[1])}"
    return _counts(item)[0]


PARSERS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "float": _real,
    "bool": _boolean,
    "str": _text,
    "Path": lambda value: Path(_text(value)).expanduser(),
    "bytes": _bytes,
    "amount": lambda value: AUTO if value == AUTO else _amount(value),
    "seconds": _seconds,
    "limit": _time_limit,
    "interval": lambda value: AUTO if value == AUTO else _seconds(value),
    "count": lambda value: AUTO if value == AUTO else _integer(value),
    "size": image_size,
    "accuracy": accuracy,
    "counts": _counts,
    "shares": _shares,
    "names": lambda value: tuple(_text(item) for item in _items(value)),
    # Not split at commas: an option of a batch system may hold some.
    "words": lambda value: tuple(_text(item) for item in (value if isinstance(value, list | tuple) else [value])),
    # A flag without a value is a bool. Texts are normalized, because --resume and reports compare them.
    "trace": lambda value: parse_trace(value if isinstance(value, bool) else _text(value)).text,
    "compression": lambda value: parse_compression(_text(value)).text,
}

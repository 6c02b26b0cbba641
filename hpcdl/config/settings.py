"""How a setting is declared: a dataclass field with a sentence for people and a parser for text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hpcdl.core.units import format_bytes, format_seconds, parse_bytes, parse_seconds

REQUIRED = dataclasses.MISSING


def setting(
    default: Any,
    help: str,
    *,
    kind: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field: `help` is one sentence, `kind` overrides the type's own.

    Kinds beside types: `bytes`, `seconds`, `size`, and the lists `counts` (whole numbers from 1 on) and `names`.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most}
    metadata = {"help": help, "kind": kind, "limits": limits, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One declared setting; `key` is the flag's name without dashes in front."""

    name: str
    key: str
    kind: str
    help: str
    default: Any
    optional: bool
    limits: dict[str, float | None]
    choices: tuple[str, ...]

    @property
    def required(self) -> bool:
        """Whether the user must give it."""
        return self.default is REQUIRED

    def parse(self, value: Any) -> Any:
        """The typed value of `value` (text of a flag, or a TOML value). ValueError says what is possible."""
        if value is None or (self.optional and value in ("", "none")):
            if self.optional:
                return None
            raise ValueError("a value is needed")
        parsed = PARSERS[self.kind](value)
        if self.choices and parsed not in self.choices:
            raise ValueError(f"{value!r} is not one of {', '.join(self.choices)}")
        self._check_limits(parsed)
        return parsed

    def _check_limits(self, value: Any) -> None:
        tests: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
            "at_least": ("at least", lambda given, bound: given >= bound),
            "above": ("above", lambda given, bound: given > bound),
            "at_most": ("at most", lambda given, bound: given <= bound),
        }
        for name, (words, holds) in tests.items():
            bound = self.limits[name]
            if bound is not None and not holds(value, bound):
                raise ValueError(f"{value} is out of range; it must be {words} {bound:g}")

    def show(self, value: Any) -> str:
        """`value` as a user would type it."""
        if value is None:
            return "none"
        if self.kind == "size":
            return "x".join(str(side) for side in value)
        writers: dict[str, Callable[[Any], str]] = {
            "bytes": lambda number: format_bytes(number).replace(" ", ""),
            "seconds": lambda number: format_seconds(number).replace(" ", ""),
            "bool": lambda flag: "true" if flag else "false",
            "counts": lambda numbers: ",".join(map(str, numbers)),
            "names": ",".join,
        }
        return writers.get(self.kind, str)(value)


def settings_of(cls: type) -> list[Setting]:
    """The settings that the dataclass `cls` declares, in order."""
    hints = get_type_hints(cls)
    found = []
    for item in dataclasses.fields(cls):
        if "help" not in item.metadata:
            continue
        names = _type_names(hints[item.name])
        found.append(
            Setting(
                name=item.name,
                key=item.name.replace("_", "-"),
                kind=item.metadata["kind"] or next(name for name in names if name != "NoneType"),
                help=item.metadata["help"],
                default=item.default,
                optional="NoneType" in names,
                limits=item.metadata["limits"],
                choices=item.metadata["choices"],
            )
        )
    return found


def _type_names(hint: Any) -> list[str]:
    parts = getattr(hint, "__args__", None)
    return [part.__name__ for part in parts] if parts else [hint.__name__]


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError(f"{value!r} is no whole number")
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no whole number") from None


def _real(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no number") from None
    if isinstance(value, bool) or number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{value!r} is no finite number")
    return number


def _boolean(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() in words:
        return words[str(value).lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no text")
    return str(value)


def image_size(value: Any) -> tuple[int, int]:
    """Height and width of `28`, `224x192` or a list of two numbers."""
    parts = value if isinstance(value, list | tuple) else str(value).lower().split("x")
    try:
        sides = [int(part) for part in parts]
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no size; write for example 28 or 224x192") from None
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(f"{value!r} is no size; write for example 28 or 224x192")
    return sides[0], sides[-1]


def _items(value: Any) -> list[Any]:
    """The parts of `a,b`, of a list, or of a value that stands alone."""
    items = list(value) if isinstance(value, list | tuple) else str(value).split(",")
    items = [item.strip() if isinstance(item, str) else item for item in items]
    if not items or "" in items:
        raise ValueError(f"{value!r} is no list; write one or more values, separated by commas")
    return list(dict.fromkeys(items))


def _counts(value: Any) -> tuple[int, ...]:
    numbers = tuple(_integer(item) for item in _items(value))
    if min(numbers) < 1:
        raise ValueError(f"{min(numbers)} is out of range; each must be at least 1")
    return numbers


PARSERS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "float": _real,
    "bool": _boolean,
    "str": _text,
    "Path": lambda value: Path(_text(value)).expanduser(),
    "bytes": lambda value: value if isinstance(value, int) and not isinstance(value, bool) else parse_bytes(str(value)),
    "seconds": lambda value: (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else parse_seconds(str(value))
    ),
    "size": image_size,
    "counts": _counts,
    "names": lambda value: tuple(_text(item) for item in _items(value)),
}

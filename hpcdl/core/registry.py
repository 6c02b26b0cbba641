"""Names that stand for code: a registry holds strings and imports what is chosen, when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcdl.core.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a name stands for: `target` is "package.module:attribute", `summary` one line for people."""

    target: str
    summary: str


class Registry:
    """A table of names. `kind` is the word that error messages use for its members."""

    def __init__(self, kind: str, entries: Mapping[str, Entry]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Entry:
        """The entry of `name`; UnknownNameError lists the known names."""
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[name]

    def load(self, name: str) -> Any:
        """Import what `name` stands for."""
        module, _, attribute = self.entry(name).target.partition(":")
        return getattr(importlib.import_module(module), attribute)

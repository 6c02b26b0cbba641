"""Names that stand for code: a registry holds strings and imports a member only when it is chosen.

Other packages add members by entry points (docs/how-to/extend.md). They never replace one of hpcdl's own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcdl.core.errors import UnknownNameError, UsageError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The meaning of a name: `target` is "package.module:attribute", `summary` one line for people.

    `package` is the other package that added it; empty for hpcdl's own.
    """

    target: str
    summary: str
    package: str = ""


class Registry:
    """A table of names. `kind` is the word for its members in error messages.

    `group` names the entry points by which other packages add members, which follow hpcdl's own.
    """

    def __init__(self, kind: str, entries: Mapping[str, Entry], group: str = "") -> None:
        self.kind = kind
        self._own, self._group = dict(entries), group

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **added(self._group)})

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in added(self._group)

    def __len__(self) -> int:
        return len({**self._own, **added(self._group)})

    def entry(self, name: str) -> Entry:
        """Return the entry of `name`. Raises UnknownNameError with the known names, UsageError if two add it."""
        from_packages = added(self._group)
        if name in self._own:
            refuse_two(self.kind, name, ["hpcdl", *(entry.package for entry in from_packages.get(name, ()))])
            return self._own[name]
        if name not in from_packages:
            raise UnknownNameError(self.kind, name, list(self))
        refuse_two(self.kind, name, [entry.package for entry in from_packages[name]])
        return from_packages[name][0]

    def load(self, name: str) -> Any:
        """Import the object that `name` stands for. Raises UsageError if that of another package does not load."""
        return load(self.kind, name, self.entry(name))


@functools.cache
def added(group: str) -> dict[str, list[Entry]]:
    """Return the entries of other packages under the entry points of `group`, by name; read once, without imports."""
    entries: dict[str, list[Entry]] = {}
    for point in sorted(importlib.metadata.entry_points(group=group)) if group else ():
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package without a name"
        entry = Entry(target=point.value, summary=f"added by {package}", package=package)
        if entry not in entries.setdefault(point.name, []):  # the same folder may be on Python's path twice
            entries[point.name].append(entry)
    return entries


def refuse_two(kind: str, name: str, packages: list[str]) -> None:
    """Raise UsageError if several of `packages` have a member `name`: hpcdl does not guess which one is meant."""
    if len(packages) > 1:
        raise UsageError(
            f"{kind} {name!r} is in {' and in '.join(packages)}; remove one of these packages, or rename its {kind}"
        )


def load(kind: str, name: str, entry: Entry) -> Any:
    """Import the object of `entry`. Raises UsageError with the name of the other package if it does not load."""
    module, _, attribute = entry.target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        if not entry.package:
            raise
        cause = f"{type(error).__name__}: {error}"
        raise UsageError(f"{kind} {name!r} of {entry.package} does not load: {cause}") from error

"""What a site rules for all its users: the table [site] of site.toml."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdl.core.errors import UsageError, suggestion
from hpcdl.core.files import read_toml
from hpcdl.core.paths import site_config_file

_KEY = "forbid-strategies"


@dataclass(frozen=True, kw_only=True)
class SiteRules:
    """Rules, and the file that they stand in."""

    forbid_strategies: tuple[str, ...] = ()
    origin: str = ""


def site_rules() -> SiteRules:
    """The rules in force; none where there is no site.toml. UsageError where the table is wrong."""
    path = site_config_file()
    if not path.is_file():
        return SiteRules()
    table = read_toml(path).get("site", {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [site] must be a table; write [site] and {_KEY} below it")
    for key in table:
        if key != _KEY:
            raise UsageError(f"{path}: unknown key {key!r} in [site]{suggestion(key, [_KEY])}")
    names = table.get(_KEY, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f'{path}: {_KEY} must be a list of names; write {_KEY} = ["grpc-ps", "grpc-ring"]')
    return SiteRules(forbid_strategies=tuple(names), origin=str(path))

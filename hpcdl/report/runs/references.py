"""Published points of other studies (share/hpcdl/references/*.toml), to be drawn beside the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import CorruptError
from hpcdl.core.storage.files import read_toml
from hpcdl.core.records.from_json import from_json
from hpcdl.core.paths import share_folder


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One published point. `bound` says how the number was given: exact, about, above; `confidence` is papers' own.

    `workers` are what the publication counts along its axis; `unit` names them (workers, nodes, KNL nodes). `mode` is
    `unstated` where it does not say what is kept fixed. `sentence` is where it stands; `named` the network's name
    there, where taking it for `model` is our reading. `study` is that of share/hpcdl/studies which repeats it.
    """

    source: str
    citation: str
    url: str
    mode: str
    strategy: str
    model: str
    workers: int
    efficiency: float
    unit: str = "workers"
    servers: int = 0
    bound: str = "exact"
    sentence: str
    confidence: str
    named: str = ""
    note: str = ""
    study: str = ""

    @property
    def told_efficiency(self) -> str:
        """The efficiency as the source gives it: `> 80 %`."""
        signs = {"above": "> ", "about": "about "}
        return f"{signs.get(self.bound, '')}{100 * self.efficiency:g} %"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a publication states without a point that could be drawn.

    Where it has a `mode`, it is of this kind of scaling alone.
    """

    source: str
    citation: str
    url: str
    claim: str
    sentence: str
    confidence: str
    study: str = ""
    mode: str = ""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of other studies."""

    points: tuple[Reference, ...] = ()
    statements: tuple[Statement, ...] = ()


def load_references(folder: Path | None = None) -> Published:
    """What is published in `folder` (by default that of the installation); nothing where there is no such folder."""
    where = folder or share_folder() / "references"
    points: list[Reference] = []
    statements: list[Statement] = []
    for path in sorted(where.glob("*.toml")):
        try:
            document = read_toml(path, CorruptError)
            source = document["source"]
            common = {"source": source["name"], "citation": source["citation"], "url": source["url"]}
            points += [from_json(Reference, {**common, **point}) for point in document.get("point", [])]
            statements += [from_json(Statement, {**common, **item}) for item in document.get("statement", [])]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{path} is damaged: {error}") from error
    return Published(points=tuple(points), statements=tuple(statements))

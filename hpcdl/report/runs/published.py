"""Results that other studies published, to draw beside the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import CorruptError
from hpcdl.core.paths import share_folder
from hpcdl.core.records.from_json import from_json
from hpcdl.core.storage.files import read_toml


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One published point. `bound` says how the number was given: exact, about, above; `confidence` is the paper's own.

    `workers` are what the publication counts along its axis; `unit` names them (workers, nodes, KNL nodes). `mode` is
    `unstated` if the paper does not say what is fixed. `sentence` locates it there. `named` is the network's name
    there, if `model` is our interpretation. `study` is the one of share/hpcdl/studies that repeats it.
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
    def quoted_efficiency(self) -> str:
        """The efficiency as the source gives it: `> 80 %`."""
        signs = {"above": "> ", "about": "about "}
        return f"{signs.get(self.bound, '')}{100 * self.efficiency:g} %"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement in a publication without a point that could be drawn.

    If it has a `mode`, it applies only to this kind of scaling.
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
    """Known results of other studies."""

    points: tuple[Reference, ...] = ()
    statements: tuple[Statement, ...] = ()


def load_references(folder: Path | None = None) -> Published:
    """Return the publications in `folder` (default: the installation's); none if it does not exist."""
    where = folder or share_folder() / "references"
    points: list[Reference] = []
    statements: list[Statement] = []
    for path in sorted(where.glob("*.toml")):
        try:
            document = read_toml(path, CorruptError)
            source = document["source"]
            common = {"source": source["name"], "citation": source["citation"], "url": source["url"]}
            points += [from_json(Reference, {**common, **point}) for point in document.get("point", [])]
            statements += [from_json(Statement, {**common, **statement}) for statement in document.get("statement", [])]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{path} is damaged: {error}") from error
    return Published(points=tuple(points), statements=tuple(statements))

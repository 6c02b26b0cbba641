"""What a centre asks for before it grants large jobs: templates in share/hpcdl/evidence (docs/reference/evidence.md).

A site's own templates are in `evidence/` beside site.toml, and replace installed ones of the same name.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import ConfigError, UnknownNameError, suggestion
from hpcdl.core.paths import share_folder, site_config_file
from hpcdl.core.storage.files import read_toml

CHECKS: Mapping[str, bool] = {
    "node-counts": True,
    "efficiency": True,
    "repeats": True,
    "reaches-target": False,
    "same-input": False,
    "strong-scaling": False,
    "wall-times": False,
    "ran-as-jobs": False,
    "on-machine": False,
    "batch-script": False,
    "placement": False,
    "gpu-utilisation": False,
    "attached": False,
}
"""The possible checks of a criterion, and whether each needs `at-least`; checks.py implements them."""
TIMES = ("total", "steps")
"""The time for an efficiency: that of the whole training, or of its steps after warm-up."""
_MODES = ("strong", "weak")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TABLES = ("source", "criterion", "attachment")
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class RuleSource:
    """The source of a rule: `read` is the day on which it was read there, `state` the day of the page's last change."""

    url: str
    read: str
    state: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One rule. `says` is the rule in our words; `at_least` is its number.

    `attachment` is what `attached` asks for, and what `gpu-utilisation` accepts in place of records.
    """

    check: str
    says: str
    source: RuleSource
    at_least: float | None = None
    attachment: str = ""


@dataclass(frozen=True, kw_only=True)
class AttachmentKind:
    """A file that the user adds. It must contain the text `holds`, so that no other file is mistaken for it."""

    name: str
    says: str
    holds: str = ""


@dataclass(frozen=True, kw_only=True)
class AccessTemplate:
    """The criteria of a centre. `nodes` are the fewest and the most that its partition takes.

    `repeats` are those of the study that `hpcdl sweep --for` makes; `yours` is what hpcdl cannot write.
    """

    name: str
    title: str
    source: RuleSource
    criteria: Sequence[Criterion]
    machine: str = ""
    mode: str = "strong"
    time: str = "total"
    nodes: tuple[int, int] | None = None
    repeats: int = _REPEATS
    attachments: Sequence[AttachmentKind] = ()
    yours: Sequence[str] = ()

    def at_least(self, check: str) -> float | None:
        """Return the number of the first criterion with this check."""
        return next((criterion.at_least for criterion in self.criteria if criterion.check == check), None)


def template_names() -> list[str]:
    """Return the names that `--for` takes: those of the site, and the installed ones."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.toml")})


def find_template(name: str) -> AccessTemplate:
    """Return the template called `name`, or in the file `name`.

    Raises UnknownNameError if there is none, ConfigError with all its problems.
    """
    if name.endswith(".toml") or os.sep in name:
        return read_template(Path(name))
    for folder in _folders():
        if (folder / f"{name}.toml").is_file():
            return read_template(folder / f"{name}.toml")
    raise UnknownNameError("evidence template", name, template_names())


def read_template(path: Path) -> AccessTemplate:
    """Return the template in a TOML file. Raises ConfigError with all its problems."""
    reader = _Reader(path)
    template = reader.template()
    if reader.problems:
        raise ConfigError(reader.problems)
    return template


def _folders() -> list[Path]:
    return [site_config_file().parent / "evidence", share_folder() / "evidence"]


class _Reader:
    """Reads one file. Mistakes are collected in `problems`; the template gets a replacement value for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.document = read_toml(path)

    def template(self) -> AccessTemplate:
        """Return the template as far as it can be read."""
        top = {key: value for key, value in self.document.items() if key not in _TABLES}
        self._know("", top, ("title", "machine", "mode", "time", "nodes", "repeats", "yours"))
        source = self._source(self._table("source"))
        attachments = [self._attachment(item) for item in self._tables("attachment")]
        criteria = [self._criterion(item, source, attachments) for item in self._tables("criterion")]
        if not criteria:
            self._wrong("it has no [[criterion]]; write at least one, with check and says")
        return AccessTemplate(
            name=self.path.stem,
            title=self._text(top, "title"),
            source=source,
            criteria=criteria,
            machine=self._text(top, "machine", ""),
            mode=self._choice(top, "mode", _MODES),
            time=self._choice(top, "time", TIMES),
            nodes=self._nodes(top.get("nodes")),
            repeats=self._whole(top.get("repeats", _REPEATS), "repeats"),
            attachments=attachments,
            yours=self._lines(top.get("yours", [])),
        )

    def _source(self, table: Mapping[str, Any]) -> RuleSource:
        self._know("[source] ", table, ("url", "read", "state", "note"))
        url = self._text(table, "url")
        if url and not url.startswith("https://"):
            self._wrong(f"url is {url!r}; write the address of the page that has the rule, such as https://...")
        return RuleSource(
            url=url, read=self._date(table, "read"), state=self._date(table, "state", ""),
            note=self._text(table, "note", ""),
        )  # fmt: skip

    def _attachment(self, table: Mapping[str, Any]) -> AttachmentKind:
        self._know("[[attachment]] ", table, ("name", "says", "holds"))
        return AttachmentKind(
            name=self._text(table, "name"), says=self._text(table, "says"), holds=self._text(table, "holds", "")
        )

    def _criterion(
        self, table: Mapping[str, Any], source: RuleSource, attachments: Sequence[AttachmentKind]
    ) -> Criterion:
        self._know("[[criterion]] ", table, ("check", "says", "at-least", "attachment", "url", "read"))
        check = self._text(table, "check")
        if check not in CHECKS:
            self._wrong(f"unknown check {check!r}{suggestion(check, CHECKS)}")
        needs, number = CHECKS.get(check, False), table.get("at-least")
        if needs and not (isinstance(number, int | float) and not isinstance(number, bool) and number > 0):
            self._wrong(f"check {check} needs a number above 0: at-least = {0.75 if check == 'efficiency' else 3}")
        if check == "efficiency" and isinstance(number, int | float) and number > 1:
            self._wrong(f"at-least = {number} of an efficiency is more than 100 %; write a share, such as 0.75")
        if not needs and number is not None:
            self._wrong(f"check {check} takes no at-least; leave it out")
        attachment = self._text(table, "attachment", "")
        if bool(attachment) != (check == "attached") and check != "gpu-utilisation":
            self._wrong('check attached names an attachment, others do not: attachment = "affinity"')
        names = [item.name for item in attachments]
        if attachment and attachment not in names:
            self._wrong(f"unknown attachment {attachment!r}{suggestion(attachment, names)}")
        source_table = {
            "url": source.url,
            "read": source.read,
            **{key: table[key] for key in ("url", "read") if key in table},
        }
        rule = source if source_table == {"url": source.url, "read": source.read} else self._source(source_table)
        number = float(number) if needs and isinstance(number, int | float) else None
        return Criterion(
            check=check, says=self._text(table, "says"), source=rule, at_least=number, attachment=attachment
        )

    def _nodes(self, given: Any) -> tuple[int, int] | None:
        if given is None:
            return None
        # Not isinstance: TOML's true and false are ints as well.
        is_pair = isinstance(given, list) and len(given) == 2 and all(type(item) is int for item in given)
        if not is_pair or not 1 <= given[0] <= given[1]:
            self._wrong("nodes must be the fewest and the most nodes of a job: nodes = [6, 60]")
            return None
        return given[0], given[1]

    def _whole(self, given: Any, key: str) -> int:
        if type(given) is int and given >= 1:
            return given
        self._wrong(f"{key} must be a whole number from 1 on")
        return 1

    def _lines(self, given: Any) -> list[str]:
        if isinstance(given, list) and all(isinstance(item, str) for item in given):
            return given
        self._wrong('yours must be a list of texts: yours = ["describe the software"]')
        return []

    def _text(self, table: Mapping[str, Any], key: str, default: str | None = None) -> str:
        value = table.get(key, default)
        if isinstance(value, str) and (value or default == ""):
            return value
        self._wrong(f'{key} is missing or no text; write {key} = "..."')
        return ""

    def _date(self, table: Mapping[str, Any], key: str, default: str | None = None) -> str:
        value = table.get(key, default)
        # Not isinstance: a TOML date with a time is a date as well.
        text = value.isoformat() if type(value) is datetime.date else value
        if isinstance(text, str) and (_DATE.fullmatch(text) or (text == "" and default == "")):
            return text
        self._wrong(f"{key} must be the day on which the page was read, such as {key} = 2026-11-26")
        return ""

    def _choice(self, table: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
        value = table.get(key, choices[0])
        if value in choices:
            return str(value)
        self._wrong(f"{key} = {value!r} is not one of {', '.join(choices)}")
        return choices[0]

    def _table(self, name: str) -> Mapping[str, Any]:
        table = self.document.get(name)
        if isinstance(table, dict):
            return table
        self._wrong(f"[{name}] is missing; write it with url and read")
        # Stand-ins that pass every check, so that the missing table is the only mistake reported.
        return {"url": "https://", "read": "2000-01-01"}

    def _tables(self, name: str) -> list[Mapping[str, Any]]:
        tables = self.document.get(name, [])
        if isinstance(tables, list) and all(isinstance(item, dict) for item in tables):
            return tables
        self._wrong(f"{name} must be tables; write [[{name}]] for each")
        return []

    def _know(self, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                self._wrong(f"{where}unknown key {key!r}{suggestion(key, known)}")

    def _wrong(self, text: str) -> None:
        self.problems.append(f"{self.path}: {text}")

"""The page of errors explains every error class, and each of its patterns matches a message of hpcdl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcdl.core import errors
from hpcdl.core.errors import HpcdlError
from hpcdl.core.pages import manual
from tests.conftest import ROOT, CommandLine

FOREIGN = ("No such command", "No such option", "No space left on device")
"""Messages of typer and of the system."""
MESSAGES = {
    "unknown strategy 'rign'; did you mean 'ring'? known: ring, tree": "unknown-names",
    "hpcdl: --ranks: 0 is out of range; it must be at least 1": "settings-out-of-range",
    "--ranks 2: strategy 'single' is one process; use --ranks 1, or --strategy ring": "what-a-strategy-does-not-have",
    "no such data folder: nowhere; make one with `hpcdl shard SOURCE nowhere`": "no-data-folder",
    "gone holds no run of `hpcdl train`; `hpcdl runs` lists what there is": "no-run",
    "options of `train` go after --, those of submit before it: ...": "a-job-that-cannot-be-submitted",
    "cannot tell the format of x; give --format, one of: idx": "sources-that-cannot-be-read",
    "run directory runs/x exists; choose another --run-dir, or continue with --resume": "a-folder-that-exists",
    "another hpcdl writes to runs/x (host a, process 3); wait for it, or remove it": "somebody-else-writes-there",
    "x/model.keras belongs to eve, and the code that it names would run as you; add --trust": "another-users-run",
    "--seed: runs/x began with 0, now it is 1; give what it began with, or --allow seed": "resumed-with-other-settings",
    "model 'a.py:build' ends with a softmax, but --loss cross-entropy takes what comes before it (logits); leave": (
        "a-model-that-does-not-fit"
    ),
    "model 'a.py:build' failed at a.py:4: ZeroDivisionError: division by zero": "a-model-function-that-fails",
    "the gradient of conv1/kernel is not finite on rank 1": "numbers-that-are-not-finite",
    "rank 1 on node2 ended without a word (killed, out of memory or crashed); see log": "ranks-that-do-not-start",
    "node node2 with rank 1 went down or cannot be reached; continue with --resume": "a-node-that-is-gone",
    "ranks differ in --seed: rank 0 has 0, rank 1 has 1; start every rank with the same command": "ranks-that-differ",
    "checkpoint file runs/x/1/a.h5 is damaged or missing": "damaged-files",
    "shards is not finished; continue with the same `hpcdl shard` command and --resume": "a-folder-that-exists",
    "is not finished": "a-folder-that-exists",
    "exit code 75": "exit-code-75",
    "exited with 2": "exit-code-2",
    "--out o holds outputs already; continue with --resume, or name a new folder": "a-folder-that-exists",
    "--resume: o began with the model 1f, now it is 2e; give what it began with": "resumed-with-other-settings",
    "digits holds bytes (images), and m.keras does not say how it takes them: give --scale 0..1": (
        "a-model-that-infer-cannot-take"
    ),
    "CorruptError": "corrupterror",
    "no-room": "no-room",
}


def classes(root: type[HpcdlError] = HpcdlError) -> list[str]:
    """Return the names of all error classes in the tree."""
    return [root.__name__, *(name for branch in root.__subclasses__() for name in classes(branch))]


@pytest.mark.parametrize("name", sorted(set(classes())))
def test_every_class_is_explained(name: str) -> None:
    if getattr(errors, name, None) is None:
        pytest.skip(f"{name} is a room's own")
    assert manual.explain(name).title == name


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_leads_to_its_paragraph(message: str) -> None:
    assert manual.explain(message).anchor == MESSAGES[message]


@pytest.mark.parametrize("paragraph", manual.error_paragraphs(), ids=lambda paragraph: paragraph.anchor)
def test_patterns_are_words_of_the_program(paragraph: manual.Paragraph) -> None:
    source = " ".join(path.read_text() for path in (ROOT / "hpcdl").rglob("*.py"))
    joined = re.sub(r"[\"']\s*(?:\n\s*)f?[\"']", "", source)
    for pattern in paragraph.says:
        if pattern.startswith(FOREIGN):
            continue
        longest = max(pattern.split("..."), key=len).strip()
        assert longest.rstrip(";: ") in joined, f"no message holds {longest!r}; correct docs/reference/errors.md"


def test_codes_and_what_nobody_says(ask_hpcdl: CommandLine) -> None:
    stopped = manual.explain("75").text
    assert "something to resume" in stopped and "hpcdl train --resume --run-dir RUN" in stopped
    assert "`hpcdl explain ConfigError`" in manual.explain("2").text
    reported = ask_hpcdl(["explain", "unknown", "strategy", "'rign'"])
    assert (
        reported.code == 0 and reported.out.startswith("Unknown names\n") and "errors.md#unknown-names" in reported.err
    )
    assert manual.explain("is not responding").anchor == "ranks-that-wait-for-another", "a part of a message does"
    section = manual.explain("numbers-that-are-not-finite").text
    assert section in manual.explain("NotFiniteError").text, "what it refers to is told with it"
    refused = ask_hpcdl(["explain", "the dog ate it"])
    assert refused.code == 2 and len(refused.err.splitlines()) == 1


def test_the_pages_are_found_and_searched(ask_hpcdl: CommandLine) -> None:
    assert Path(ask_hpcdl(["docs"]).out.strip()) in (ROOT / "docs" / "index.md", ROOT / "build" / "site" / "index.html")
    found = ask_hpcdl(["docs", "moving", "rate"])
    assert found.code == 0 and "explanation/easgd.md:" in found.out
    pages = [line.partition(":")[0] for line in ask_hpcdl(["docs", "checkpoint"]).out.splitlines()]
    kinds = [page.rpartition("/")[0].partition("/")[0] for page in pages]
    assert pages[0] == "how-to/checkpoints.md" and len(set(pages)) == len(pages)
    assert kinds == sorted(kinds, key=[*manual.KINDS, *kinds].index), "pages that say what to type come first"
    named = ask_hpcdl(["docs", "own-model"])  # as the line `next:` of `hpcdl shard` says
    assert named.out.startswith("how-to/own-model.md:1: # Train your own Keras model"), named.out
    rows = ask_hpcdl(["docs", "checkpoint", "--json"]).json()["found"]
    assert len(rows) > len(pages) and rows[0]["page"].endswith("how-to/checkpoints.md")

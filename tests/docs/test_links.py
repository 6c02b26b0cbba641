"""Every link has a target, and every page can be reached from docs/index.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, anchors, links, pages, relative


def target(page: Path, link: str) -> tuple[Path, str]:
    """Return the file that a link of `page` names, and the anchor in it."""
    name, _, anchor = link.partition("#")
    return ((page.parent / name).resolve() if name else page), anchor


@pytest.mark.parametrize("page", pages(), ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, anchor = target(page, link)
        assert path.exists(), f"{relative(page)}: {link} is not there"
        assert not anchor or anchor in anchors(path), f"{relative(page)}: {link} names no heading"


@pytest.mark.parametrize("folder", ["hpcdl", "docs", "share", "etc", "scripts", "benchmarks", "tests"])
def test_paths_of_pages_and_tests_that_are_spoken_of_exist(folder: str) -> None:
    named = re.compile(r"(?<!/)\b(?:docs|tests|benchmarks)/[\w/-]+\.(?:md|py)\b")  # after a slash: another project's
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".md", ".toml", ".lua", ".sh", "") and path.is_file():
            lost = [name for name in named.findall(path.read_text(errors="replace")) if not (ROOT / name).exists()]
            assert not lost, f"{relative(path)} speaks of {', '.join(lost)}"


def test_every_page_is_found_from_the_index() -> None:
    seen = {DOCS / "index.md"}
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        for link in links(page):
            path = target(page, link)[0]
            if path.suffix == ".md" and path.is_relative_to(DOCS) and path not in seen:
                seen.add(path)
                waiting.append(path)
    lost = {relative(page) for page in pages() if page.is_relative_to(DOCS)} - {relative(page) for page in seen}
    lost = {name for name in lost if not name.startswith("docs/decisions/") and "/report/" not in name}
    assert not lost, f"no page leads to {sorted(lost)}"
    assert ROOT / "README.md" in pages()


@pytest.mark.parametrize(
    "name", ["metrics.md", "performance.md", "performance-data.md", "run-record.md", "safety.md", "site-guide.md"]
)
def test_pages_that_others_point_to_stay_where_they_are(name: str) -> None:
    """These pages keep their paths, which records, modulefiles and site pages refer to."""
    assert (DOCS / name).is_file()


def test_every_decision_has_a_number_of_its_own() -> None:
    numbers = [path.name.partition("-")[0] for path in (DOCS / "decisions").glob("[0-9]*.md")]
    assert len(numbers) == len(set(numbers)), sorted({number for number in numbers if numbers.count(number) > 1})

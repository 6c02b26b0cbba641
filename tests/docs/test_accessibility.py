"""axe-core, in a real browser, on every page for users: reports, cards, traces and the documentation site.

Light and dark, on a phone, a tablet and a desktop; no page may be too wide. axe-core comes from npm by
`scripts/axe`, the site from `make docs`.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcdl.bench.certify import Plan, Trial, write_card
from hpcdl.trace.findings import findings
from hpcdl.trace.page import page as trace_page
from tests.conftest import ROOT
from tests.report.test_page import FLAGS, PAGE
from tests.trace.made import synchronous
from tests.trace.test_viewers import COMPUTE_S, INPUT_S

AXE = ROOT / "build" / "axe" / "package" / "axe.min.js"
SITE = ROOT / "build" / "site"
EVIDENCE = ROOT / "docs" / "example-evidence" / "document" / "evidence.html"
WIDTHS = (360, 800, 1400)
SERIOUS = ("serious", "critical")
OF_COLOURS = ("color-contrast", "link-in-text-block")
"""Rules that only dark colours can break: in the dark, the many pages of the site are checked against these alone."""
DRIVER = """<!DOCTYPE html><title>axe</title><iframe id=frame style="border:0;height:900px"></iframe><script>
const axe = AXE, pages = PAGES, said = [];
const moment = () => new Promise(done => setTimeout(done, 50));
const opened = url => new Promise(done => { frame.onload = done; frame.src = url });
(async () => {
  for (const [place, url] of pages.entries()) {
    await opened(url);
    const inside = frame.contentWindow, all = inside.document;
    const turn = place / SAMPLED, chosen = Number.isInteger(turn);
    if (chosen) inside.eval(axe);
    for (const width of WIDTHS) {
      frame.style.width = width + 'px';
      await moment();
      const asked = chosen && (EACH_WIDTH || width == WIDTHS[turn % WIDTHS.length]);
      const found = asked ? await inside.axe.run(all, OPTIONS) : { violations: [] };
      const told = one => [one.impact, one.id, one.nodes.length, one.nodes[0].html.slice(0, 200)];
      const background = inside.getComputedStyle(all.body).backgroundColor;
      said.push([url, width, all.documentElement.scrollWidth, background, found.violations.map(told)]);
    }
  }
  const last = document.createElement('pre'); last.id = 'said'; last.textContent = JSON.stringify(said);
  document.body.append(last);
})();
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    return str(shutil.which("chromium"))


def looked_at(
    browser: str,
    pages: list[Path],
    folder: Path,
    *flags: str,
    rules: tuple[str, ...] = (),
    sampled: int = 1,
    each_width: bool = True,
) -> list[tuple[str, int, int, str, list[Any]]]:
    """Return for each page and width: its width, its background, and axe's findings by `rules` (default all).

    The width of every page is checked. With `sampled`, axe checks only one page of that many; unless `each_width`, at
    one width, and the next page at the next width: pages of a site are alike.
    """
    options = {"resultTypes": ["violations"], **({"runOnly": {"type": "rule", "values": rules}} if rules else {})}
    words = {
        "OPTIONS": json.dumps(options),
        "AXE": json.dumps(AXE.read_text()).replace("</", "<\\/"),
        "WIDTHS": str(list(WIDTHS)),
        "SAMPLED": str(sampled),
        "EACH_WIDTH": json.dumps(each_width),
    }
    words["PAGES"] = json.dumps([path.as_uri() for path in pages])
    driver = folder / "driver.html"
    driver.write_text(re.sub(r"\b(AXE|EACH_WIDTH|OPTIONS|PAGES|SAMPLED|WIDTHS)\b", lambda word: words[word[0]], DRIVER))
    finished = subprocess.run(
        [browser, *FLAGS, "--allow-file-access-from-files", "--virtual-time-budget=3600000", "--dump-dom", *flags,
         f"--user-data-dir={folder / 'profile'}", driver.as_uri()],
        capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="said">(.*?)</pre>', finished.stdout, re.DOTALL)
    assert found, finished.stderr[-2000:]
    reported: list[tuple[str, int, int, str, list[Any]]] = json.loads(html.unescape(found[1]))
    assert len(reported) == len(pages) * len(WIDTHS)
    return reported


def own_pages(folder: Path) -> list[Path]:
    """Write a report, evidence, a card and a trace, without the policy that would block axe's script."""
    merged, steps = synchronous(INPUT_S, COMPUTE_S, hidden_s=0.02)
    trial = Trial(
        fault="worker killed", strategy="ring", survived=True, struck=True, recover_s=2.0, steps_lost=1, said=""
    )
    (folder / "card").mkdir()
    tried = Plan(strategies=["ring"], faults=["worker killed"], tries=1, num_ranks=3, out=folder / "card", num_nodes=2)
    card = write_card(tried, [trial])
    texts = {
        "report.html": PAGE.read_text(),
        "evidence.html": EVIDENCE.read_text(),
        "trace.html": trace_page("run", merged, steps, findings(merged, steps)),
        "card.html": card.read_text(),
    }
    for name, text in texts.items():
        (folder / name).write_text(re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", text))
    return [folder / name for name in texts]


@pytest.mark.lab("axe", "chromium")
@pytest.mark.parametrize("flags", [(), ("--force-dark-mode",)], ids=["light", "dark"])
@pytest.mark.parametrize(
    "which, sampled",
    [
        pytest.param("own", 1, id="own"),
        pytest.param("site", 8, id="site", marks=pytest.mark.lab("built-site")),
        pytest.param("site", 1, id="site-every-page", marks=[pytest.mark.lab("built-site"), pytest.mark.soak]),
    ],
)
def test_no_serious_fault_and_nothing_sticks_out(
    browser: str, tmp_path: Path, flags: tuple[str, ...], which: str, sampled: int
) -> None:
    pages = (
        own_pages(tmp_path)
        if which == "own"
        else [path for path in sorted(SITE.rglob("*.html")) if path.name not in (PAGE.name, EVIDENCE.name)]
    )
    rules = OF_COLOURS if which == "site" and flags else ()
    each_width = sampled == 1
    if flags:  # dark pages have the same width
        pages, sampled = pages[::sampled], 1
    wrong = []
    reported = looked_at(browser, pages, tmp_path, *flags, rules=rules, sampled=sampled, each_width=each_width)
    for url, width, needed, background, faults in reported:
        name = f"{url.rpartition('/')[2]} at {width}"
        wrong += [f"{name}: {fault}" for fault in faults if fault[0] in SERIOUS]
        wrong += [f"{name}: {needed} pixels wide"] if needed > width else []
        if background != "rgba(0, 0, 0, 0)":  # a card has the browser's background
            dark = sum(map(int, re.findall(r"\d+", background)[:3])) < 384
            wrong += [f"{name}: background {background}"] if dark != bool(flags) else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.lab("axe", "chromium")
def test_axe_really_looks(browser: str, tmp_path: Path) -> None:
    """The test above can fail: it finds a picture without text, unreadable text and a page that is too wide."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><html><body style='background:#fff'><img src='x.png'><p style='color:#ddd'>pale</p>"
        "<div style='width:900px'>wide</div></body></html>"
    )
    reported = looked_at(browser, [bad], tmp_path)
    faults = {name for impact, name, *_ in reported[0][4] if impact in SERIOUS}
    assert {"image-alt", "color-contrast", "html-has-lang"} <= faults
    assert [needed > width for _, width, needed, _, _ in reported] == [True, True, False]

"""A campaign of damaged files and of kills: no user data may be lost, and every end must be reported correctly.

    python -m tests.campaign files [--mutations 3000] [--seed 1]
    python -m tests.campaign kills [--only train,run] [--tries 0] [--seed 1] [--folder DIR]

`files` damages a valid example of every kind of file that hpcdl reads, with other mutations for each seed; `kills`
strikes commands at random moments, and resumes them. `--tries 0` takes the number of TRIES for each. Problems are
reported when they are found, their folders stay, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.campaign.kills import Campaign, Try, table
from tests.campaign.targets import TARGETS
from tests.fuzz.batches import DIED, outcome
from tests.fuzz.kinds import KINDS

TRIES = {"train": 40, "run": 20, "shard": 30, "sweep": 15, "search": 15, "report": 15, "install": 20}
"""Three of four tries are SIGKILLs."""
NEW = 1_000_000
"""Smaller numbers are the mutations of `pytest tests/fuzz`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["files", "kills"])
    parser.add_argument("--mutations", type=int, default=3000, help="in all")
    parser.add_argument("--only", default="", help="commands, by commas")
    parser.add_argument("--tries", type=int, default=0, help="of each command")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for what is found (else a new one)")
    asked = parser.parse_args()
    if asked.part == "files":
        return files(asked.mutations, asked.seed)
    names = [name for name in asked.only.split(",") if name] or [*TARGETS]
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="hpcdl-campaign-"))).resolve()
    return kills(folder, {name: asked.tries or TRIES[name] for name in names}, asked.seed)


def files(mutations: int, seed: int) -> int:
    """Run mutations of all kinds, in turn."""
    each = -(-mutations // len(KINDS))
    began_s, codes, bad = time.monotonic(), Counter[int](), 0
    for name in KINDS:
        found = outcome(name, range(seed * NEW, seed * NEW + each))
        codes += found.codes
        bad += len(found.failures)
        for failure in found.failures:
            print(failure, flush=True)
    seconds = time.monotonic() - began_s
    print(f"{each * len(KINDS)} mutations of {len(KINDS)} kinds of files in {seconds:.0f} s")
    print("| read as sound | refused as the user's (2) | refused as damaged (3) | a sample failed (1) | wrong |")
    print("|---|---|---|---|---|")
    print(f"| {codes[0]} | {codes[2]} | {codes[3]} | {codes[1]} | {bad} |" + (" some died" if codes[DIED] else ""))
    return min(bad, 1)


def kills(folder: Path, tries: dict[str, int], seed: int) -> int:
    """Run the given number of tries of each command; print the table of all at the end."""
    began_s, found = time.monotonic(), list[Try]()
    campaign = Campaign(folder, [*tries], seed)
    for name, number in tries.items():
        for one in campaign.tries(name, number):
            found.append(one)
            print(json.dumps(asdict(one)), flush=True)
    print(f"{len(found)} tries in {time.monotonic() - began_s:.0f} s, in {folder}")
    print(table(found))
    wrong = any(one.problems or one.lost for one in found)
    if not wrong:
        shutil.rmtree(folder)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

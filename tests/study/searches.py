"""Searches with fake trials: `python -m tests.study.searches FOLDER` resumes one as `hpcdl search` would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpcdl.config.search import SearchStudy, load_search
from hpcdl.report.runs.searches import SearchRecord
from hpcdl.study.jobs import Allocation
from hpcdl.study.search import HyperparameterSearch, open_search

FAKE = Path(__file__).with_name("fake_trial.py")
SPACE = "[space]\nlearning-rate = {low = 1e-4, high = 1.0, log = true}\nbatch-size = [16, 32]\n"
TRAIN = '[train]\nmodel = "lenet"\ndata = "digits"\n'


def make_search(folder: Path, text: str = "", space: str = SPACE, train: str = TRAIN, **flags: Any) -> SearchStudy:
    """Return a search of the fake's learning rate; `text` holds more keys of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "search.toml"
    path.write_text(f'name = "fake"\n{text}\n{space}{train}')
    return load_search(path, {key.replace("_", "-"): value for key, value in flags.items()})


def run(folder: Path, search: SearchStudy, *, resume: bool = False, pace_s: float = 0.0) -> SearchRecord:
    """Run the search in this process."""
    command = (sys.executable, str(FAKE), str(folder), str(pace_s))
    record = open_search(folder / "out", search, resume=resume)
    allocation = Allocation(nodes=("here",), settle_s=0.0, command=command)
    return HyperparameterSearch(folder / "out", search, record, allocation).run()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    run(where, load_search(where / "search.toml", {}), resume=True, pace_s=0.1)

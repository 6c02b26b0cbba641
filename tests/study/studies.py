"""Studies with fake runs: `python -m tests.study.studies FOLDER [--resume]` sweeps one as `hpcdl sweep` would."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcdl.config.study import Study, load_study
from hpcdl.core.errors import HpcdlError
from hpcdl.study.jobs import Allocation
from hpcdl.study.plan import StudyRuns, make_plan
from hpcdl.study.state import StudyState, open_study
from hpcdl.study.sweep import News, Sweep, raise_for

FAKE = Path(__file__).with_name("fake_train.py")
MATRIX = {"model": "lenet", "data": "synthetic:mnist", "batch-size": 8}


def small_study(**flags: Any) -> tuple[Study, StudyRuns]:
    """Return a study of the fake, with underscores in keys; by default two points, twice each."""
    given = {"workers": "1,2", "repeats": 2, **flags}
    study = load_study(None, {**MATRIX, **{key.replace("_", "-"): value for key, value in given.items()}})
    return study, make_plan(study)


def behave(folder: Path, **plans: Any) -> Allocation:
    """Return a machine whose `hpcdl train` is a fake that obeys `plans`; `folder` holds its behaviour and log.

    `seconds` is the duration of a run; each other key is a run name (_ for -) with the behaviour of its starts.
    """
    folder.mkdir(exist_ok=True)
    named = {key.removeprefix("run_").replace("_", "-"): value for key, value in plans.items()}
    (folder / "behaviour.json").write_text(json.dumps(named))
    return _fake(folder)


def _fake(folder: Path) -> Allocation:
    return Allocation(nodes=("here",), settle_s=0.0, command=(sys.executable, str(FAKE), str(folder)))


def sweep(
    folder: Path,
    allocation: Allocation,
    study: Study,
    plan: StudyRuns,
    *,
    resume: bool = False,
    notify: Callable[[News], None] = lambda news: None,
) -> StudyState:
    """Sweep the study in this process."""
    state = open_study(folder, study, plan, resume=resume)
    return Sweep(folder, study, plan, state, allocation, notify).run()


def told(folder: Path, what: str = "start") -> list[dict[str, Any]]:
    """Return what the fake runs recorded, in order."""
    path = folder / "starts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [item for item in map(json.loads, lines) if item["what"] == what]


def main() -> None:
    folder = Path(sys.argv[1])
    study, plan = small_study(repeats=3)
    try:
        state = sweep(folder / "study", _fake(folder), study, plan, resume="--resume" in sys.argv)
        raise_for(state, folder)
    except HpcdlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

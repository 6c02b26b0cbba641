"""Which library Keras would compute with: hpcdl takes TensorFlow alone, and says so before Keras is imported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from hpcdl.core.errors import UsageError

TENSORFLOW = "tensorflow"
BACKEND_VARIABLE = "KERAS_BACKEND"


def other_backend(environment: Mapping[str, str]) -> str | None:
    """What chooses a backend other than TensorFlow, and what to set; None where Keras would take TensorFlow.

    As Keras itself reads it: the variable counts, then the user's keras.json.
    """
    named = environment.get(BACKEND_VARIABLE)
    if named:
        return None if named == TENSORFLOW else f"{BACKEND_VARIABLE}={named}: {_remedy()}"
    path = _settings_file(environment)
    try:
        named = json.loads(path.read_text()).get("backend", TENSORFLOW)
    except (OSError, ValueError, AttributeError):  # Keras passes over such a file too
        return None
    return None if named == TENSORFLOW else f"{path} has the backend {named}: {_remedy()}"


def check_backend() -> None:
    """UsageError where Keras would take another backend than TensorFlow."""
    problem = other_backend(os.environ)
    if problem:
        raise UsageError(problem)


def _settings_file(environment: Mapping[str, str]) -> Path:
    home = environment.get("KERAS_HOME")
    return Path(home) / "keras.json" if home else Path.home() / ".keras" / "keras.json"


def _remedy() -> str:
    return f"hpcdl trains with Keras on TensorFlow alone; set {BACKEND_VARIABLE}={TENSORFLOW}"

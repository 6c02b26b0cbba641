"""Environment modules (Lmod, Environment Modules) that a command loads before it does anything else."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from hpcdl.core.errors import UsageError

LOADED = "HPCDL_LOADED_MODULES"
"""Set in what was started with modules, so that it does not load them again."""
_SCRIPT = """
names=$1 before=$(command -v hpcdl); shift
if ! type module >/dev/null 2>&1; then
  for init in "${LMOD_DIR:-/usr/share/lmod/lmod/libexec}/../init/bash" "${MODULESHOME:-/usr/share/modules}/init/bash"
  do [ -r "$init" ] && . "$init" && break; done
fi
type module >/dev/null 2>&1 || { echo "hpcdl: --module $names: there is no command module here" >&2; exit 2; }
for name in ${names//,/ }; do
  told=$(module load "$name" 2>&1) && module load "$name" >/dev/null 2>&1 || {
    told=$(echo $told); echo "hpcdl: --module $name cannot be loaded: ${told:0:160}; see module avail" >&2; exit 2
  }
done
now=$(command -v hpcdl)
[ -n "$now" ] && [ "$now" != "$before" ] && exec "$now" "${@:5}"
exec "$@"
"""
"""Asks first in a subshell for what is said; a module that brings a hpcdl of its own is who goes on."""


def go_on_with(modules: str, arguments: Sequence[str]) -> None:
    """Start `hpcdl ARGUMENTS` anew, in place of this process, with `modules` (names by commas) loaded.

    Comes back where they are loaded. UsageError without bash; whoever goes on says what cannot be loaded, and leaves
    with 2.
    """
    if os.environ.get(LOADED) == modules:
        return
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("--module needs bash; load the modules yourself, and leave it out")
    command = [bash, "-c", _SCRIPT, "hpcdl", modules, sys.executable, "-P", "-m", "hpcdl", *arguments]
    os.execve(bash, command, {**os.environ, LOADED: modules})

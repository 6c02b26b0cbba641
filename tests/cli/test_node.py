from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

Run = Callable[..., Any]


def test_show_a_known_machine(ask_hpcdl: Run) -> None:
    done = ask_hpcdl(["node", "show", "--machine", "stampede2-knl-snc4-flat"])
    assert done.code == 0, done.err
    assert "memory mode    flat, snc4" in done.out
    assert "node 4  MCDRAM 4 GiB  no cores" in done.out
    assert "[3 3 3 3" in done.out  # the four ranks as published
    assert "published settings" in done.err


def test_show_this_node_as_json(ask_hpcdl: Run) -> None:
    document = ask_hpcdl(["node", "show", "--json"]).json()
    assert document["allowed_cpus"] == sorted(os.sched_getaffinity(0))
    assert len(document["fingerprint"]) == 16


def test_env_can_be_evaluated_by_a_shell(ask_hpcdl: Run) -> None:
    done = ask_hpcdl(["node", "env", "--machine", "theta-knl"])
    assert done.code == 0, done.err
    script = done.out + '\nprintf "%s" "$HPCDL_INTRA_OP_THREADS"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == "32"
    assert "# local rank 3: numactl --physcpubind=48-63,112-127 COMMAND" in done.out


def test_a_foreign_profile_file_is_an_error(ask_hpcdl: Run) -> None:
    done = ask_hpcdl(["node", "env", "--profile", "absent.toml"])
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1

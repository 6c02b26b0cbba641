"""hpcdl on a cluster: installed by `make install`, loaded as a module, used by an unprivileged user."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from tests.lab.hosts import LOGIN, USER
from tests.lab.installed import Site
from tests.lab.needs import LMOD
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab
WORLD = (
    "from mpi4py import MPI; w = MPI.COMM_WORLD; print(w.size, sum(w.allgather(w.rank)), MPI.Get_library_version()[:8])"
)


def test_both_installs_say_what_they_did(site: Site) -> None:
    for what, tree in (("mpich", site.prefix / "1.0"), ("site", site.prefix_with_space / "1.1-openmpi")):
        out = site.outputs[what].out
        assert str(tree) in out and f"module use {site.moduledir}" in out
        taken = re.search(r"installed in (\d+) s: ([\d.]+) GB in ([\d,]+) files; 0 MB were fetched", out)
        assert taken and 0 < int(taken[1]) < 3600 and 10_000 < int(taken[3].replace(",", "")) < 100_000, out
        assert (tree / "install.json").is_file() and not (tree / ".hpcdl-unfinished").exists()
    assert not (site.prefix_with_space / "1.1-openmpi" / "stale").exists(), "FORCE=1 replaces the old tree"
    assert "these versions stay as they are: 1.0\n" in site.outputs["site"].out, "VERSION=1.1, beside the one before"
    assert sorted(path.name for path in (site.moduledir / "hpcdl").iterdir()) == ["1.0.lua", "1.1-openmpi.lua"]
    names = sorted(path.name for path in site.prefix_with_space.iterdir())
    assert names == ["1.1-openmpi", "1.1-openmpi.kept"]
    assert (site.prefix_with_space / "1.1-openmpi.kept" / "stale").is_file(), "nobody can say that it is not the site's"


def test_nothing_else_was_touched(site: Site) -> None:
    assert site.changed_outside == frozenset()


def test_everybody_can_read_it_whatever_the_umask(site: Site) -> None:
    for root in (site.prefix, site.prefix_with_space, site.moduledir):
        for folder, _, files in os.walk(root):
            mode = Path(folder).stat().st_mode
            assert mode & 0o055 == 0o055 and not mode & 0o022, folder
            for name in files:
                mode = Path(folder, name).lstat().st_mode
                assert stat.S_ISLNK(mode) or (mode & 0o044 == 0o044 and not mode & 0o022), f"{folder}/{name}"


def test_the_receipt_names_what_is_inside(site: Site) -> None:
    receipt = json.loads((site.prefix / "1.0" / "install.json").read_text())
    assert (receipt["version"], receipt["mpi"]) == ("1.0", "mpich")
    assert any(line.startswith("tensorflow==") for line in receipt["packages"])
    assert any(line.startswith("mpich==") for line in receipt["packages"])
    other = json.loads((site.prefix_with_space / "1.1-openmpi" / "install.json").read_text())
    assert other["mpi"] == "site" and not any(line.startswith("mpich==") for line in other["packages"])


def test_a_second_install_is_refused(site: Site) -> None:
    finished = site.checkout.make("install", *site.settings())
    assert finished.code == 2 and "already" in finished.err and "FORCE=1" in finished.err


def test_a_tree_in_use_is_not_replaced(site: Site, lab_slurm: SlurmLab) -> None:
    """A tree is not replaced while a job of another user, on a node of this machine, uses it."""
    script = site.script("exec hpcdl-python -c 'import numpy, time; print(1, flush=True); time.sleep(60)'")
    line = lab_slurm.command(["bash", "-c", script], user=USER, host="node2")
    with subprocess.Popen(line, stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout and job.stdout.readline() == b"1\n"
            finished = site.checkout.make("install", *site.settings(), "FORCE=1")
        finally:
            lab_slurm.run(["pkill", "-u", USER, "-x", "python"], host="node2")
    assert finished.code == 2 and "in use by process" in finished.err
    assert (site.prefix / "1.0" / "install.json").exists()


def test_lmod_finds_no_fault_in_the_tree(site: Site) -> None:
    program = LMOD / "libexec" / "check_module_tree_syntax"
    checked = subprocess.run([program, site.moduledir], capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and "No errors found" in checked.stdout + checked.stderr


@pytest.mark.parametrize("version", ["1.0", "1.1-openmpi"])
def test_a_user_loads_it_on_any_host(site: Site, lab_slurm: SlurmLab, version: str) -> None:
    commands = (
        "hpcdl --version",
        "test $(command -v python3) = /usr/bin/python3",
        'test "$(command -v python)" = "$HPCDL_ROOT/bin/python"',
        "python -c 'import hpcdl, keras'" if version == "1.0" else "python -c 'import hpcdl'",
        f'test {"-n" if version == "1.0" else "-z"} "$(command -v mpiexec | grep "$HPCDL_ROOT/bin")"',
        'test -d "$HPCDL_SHARE/examples/digits/0" && test "$HPCDL_DOCS" = "$HPCDL_SHARE/docs"',
        "hpcdl models --json >/dev/null",
        "hpcdl-python -c 'import hpcdl; print(hpcdl.__version__)'",
    )
    for host in (LOGIN, "node3"):
        finished = site.run(lab_slurm, *commands, version=version, host=host)
        assert finished.code == 0, finished.err
        number = version.split("-")[0]
        assert finished.out.splitlines()[0] == f"hpcdl {number}" and finished.out.splitlines()[-1] == number


def test_manual_and_completion(site: Site, lab_slurm: SlurmLab) -> None:
    commands = (
        "man -w hpcdl hpcdl-train hpcdl-config-show",
        "COMP_WORDS=(hpcdl tra); COMP_CWORD=1; _hpcdl_completion hpcdl; echo ${COMPREPLY[*]}",
        "COMP_WORDS=(hpcdl train --strat); COMP_CWORD=2; _hpcdl_completion hpcdl; echo ${COMPREPLY[*]}",
        'source "$HPCDL_ROOT/share/completions/hpcdl.bash"; complete -p hpcdl',
    )
    finished = site.run(lab_slurm, *commands)
    assert finished.code == 0, finished.err
    *pages, first, second, registered = finished.out.splitlines()
    assert [Path(page).name for page in pages] == ["hpcdl.1", "hpcdl-train.1", "hpcdl-config-show.1"]
    assert (first, second) == ("train trace", "--strategy") and "-F _hpcdl_completion" in registered


def test_two_versions_swap(site: Site, lab_slurm: SlurmLab) -> None:
    finished = site.run(lab_slurm, "hpcdl --version", "module -q swap hpcdl hpcdl/1.1-openmpi", "hpcdl --version")
    assert finished.out == "hpcdl 1.0\nhpcdl 1.1\n", finished.err


@pytest.mark.parametrize("version, library", [("1.0", "MPICH Ve"), ("1.1-openmpi", "Open MPI")])
def test_mpiexec_of_a_page_starts_ranks_of_one_job(site: Site, lab_slurm: SlurmLab, version: str, library: str) -> None:
    """`mpiexec -n 2 python ...` starts ranks of one job: the tree's own or the site's, with the module's `python`."""
    finished = site.run(lab_slurm, f'mpiexec -n 2 python -c "{WORLD}"', version=version, host="node1")
    assert finished.code == 0, finished.err
    assert finished.out.splitlines() == [f"2 1 {library}"] * 2


@pytest.mark.parametrize("version, mpi, library", [("1.0", "pmi2", "MPICH Ve"), ("1.1-openmpi", "pmix", "Open MPI")])
def test_ranks_on_four_nodes_are_one_job(site: Site, lab_slurm: SlurmLab, version: str, mpi: str, library: str) -> None:
    network = "UCX_TLS=tcp,self UCX_NET_DEVICES=eth0"
    settings = f"export SLURM_PMIX_FENCE=tree OMPI_MCA_hwloc_base_binding_policy=none {network}"
    commands = (settings, f'srun -K1 -N4 --mpi={mpi} hpcdl-python -c "{WORLD}"')
    finished = site.run(lab_slurm, *commands, version=version)
    assert finished.code == 0, finished.err
    assert finished.out.splitlines() == [f"4 6 {library}"] * 4


@pytest.mark.soak
def test_shards_and_training_as_a_user(site: Site, lab_slurm: SlurmLab) -> None:
    """The embedded MPI starts two ranks on one node; data, run and settings are in the user's home.

    In `make test-all` a user shards and trains in test_session.py.
    """
    assert DIGITS.is_dir()
    commands = (
        'hpcdl shard "$HPCDL_SHARE/examples/digits" shards --image-size 28 --split train=0.8,val=0.2',
        "hpcdl train --model lenet --data shards --strategy ring --ranks 2 --batch-size 16 --steps 3 --run-dir run",
    )
    finished = site.run(lab_slurm, *commands, host="node1", timeout_s=240)
    assert finished.code == 0, finished.err
    record = json.loads((lab_slurm.home / "run" / "record.json").read_text())
    assert (record["ranks"], record["hosts"], record["status"]) == (2, ["node1"], "finished")
    assert (lab_slurm.home / "run").stat().st_uid != 0
    assert sys.prefix not in json.dumps(record)

"""A small HPC cluster started by hand: `python -m tests.lab [--rate 1gbit] [--cores 0.4] [--site]` opens a login shell.

--site also installs hpcdl there as a module (two minutes). The cluster is gone when the shell ends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.lab import hosts, installed, needs, slurm


def main() -> int:
    """Start the lab, run a shell (or the command behind `--`) on `login`, stop the lab; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="", help="what each host may send, as tc spells it: 1gbit")
    parser.add_argument("--cores", type=float, default=0.0, help="processors that each node gets; by default all")
    parser.add_argument("--user", default=hosts.USER)
    parser.add_argument("--site", action="store_true", help="install hpcdl as a module first")
    parser.add_argument("command", nargs="*", default=["bash", "-l"])
    chosen = parser.parse_args()
    wanted = (*needs.FIXTURES["lab_slurm"], *(needs.FIXTURES["site"] if chosen.site else ()))
    missing = needs.all_missing(wanted)
    if missing:
        print(f"the lab cannot start: {missing}", file=sys.stderr)
        return 2
    with hosts.lab_folder() as folder:
        lab = slurm.SlurmLab(folder, num_nodes=chosen.nodes, rate=chosen.rate, cores=chosen.cores)
        try:
            lab.start()
            if chosen.site:
                site = installed.install_site(lab.shared, both_train=True)
                profile = f"source {needs.LMOD}/init/bash\nmodule use {site.moduledir}\n"
                (lab.home / ".bash_profile").write_text(profile)
            print(f"lab in {folder}: hosts login, {', '.join(lab.nodes)}; sinfo, srun and sbatch work", file=sys.stderr)
            return subprocess.run(lab.command(chosen.command, user=chosen.user), check=False).returncode
        finally:
            lab.stop()


if __name__ == "__main__":
    sys.exit(main())

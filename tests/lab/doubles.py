"""Substitutes for programs that are not available here: TACC's `ibrun`, and PBS (`qsub`, `qstat`, `qdel`).

They start real processes on the lab's hosts in the documented way of the real programs, but only as far as hpcdl relies
on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

IBRUN = """#!/bin/bash
# ibrun -n N -o OFFSET COMMAND...: N ranks on the slots of this Slurm job from OFFSET on, by mpiexec and ssh.
set -euo pipefail
if [ -z "${{SLURM_JOB_ID:-}}" ]; then
    echo "ibrun: there is no job" >&2
    exit 1
fi
ranks=$SLURM_NTASKS offset=0
while getopts n:o: option; do
    case $option in n) ranks=$OPTARG ;; o) offset=$OPTARG ;; *) exit 1 ;; esac
done
shift $((OPTIND - 1))
each=${{SLURM_TASKS_PER_NODE%%(*}}
slots=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | while read -r host; do
    for _ in $(seq "$each"); do echo "$host"; done
done | tail -n "+$((offset + 1))" | head -n "$ranks")
echo "TACC:  Starting up job $SLURM_JOB_ID" >&2
echo "$slots" >"{folder}/slots.$SLURM_JOB_ID"
exec '{mpiexec}' -rmk user -launcher ssh -f "{folder}/slots.$SLURM_JOB_ID" -n "$ranks" "$@"
"""

QSUB = """#!/bin/bash
# qsub SCRIPT: the script starts on the first node it asked for, in a login shell's bare environment and in $HOME,
# as PBS does it; its processes are one session, which qdel and the time limit end by SIGTERM and then SIGKILL, and
# the script's own end by SIGKILL.
set -euo pipefail
script=$1 state={folder}/pbs nodes=({nodes})
mkdir -p "$state"
select=$(sed -n 's/^#PBS -l select=//p' "$script")
count=${{select%%:*}} each=${{select##*mpiprocs=}}
IFS=: read -r hours minutes seconds <<<"$(sed -n 's/^#PBS -l walltime=//p' "$script")"
limit=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
[ "$count" -le "${{#nodes[@]}}" ] || {{ echo "qsub: Job exceeds queue resource limits" >&2; exit 188; }}
number=$(($(ls "$state" | wc -l) + 1))
job=$state/$number
mkdir "$job"
cp "$script" "$job/script"
for host in "${{nodes[@]:0:count}}"; do
    for _ in $(seq "$each"); do echo "$host"; done
done >"$job/nodes"
echo R >"$job/job_state"
cat >"$job/run" <<END
export PBS_JOBID=$number.pbs PBS_NODEFILE=$job/nodes PBS_O_WORKDIR=$(printf %q "$PWD") PBS_ENVIRONMENT=PBS_BATCH
cd
setsid bash $job/script >$job/output 2>&1 </dev/null &
echo \\$! >$job/session
(sleep $limit; bash $job/end) >/dev/null 2>&1 </dev/null &
limit=\\$!
wait \\$(cat $job/session)
echo \\$? >$job/exit_status
pkill -KILL -s \\$(cat $job/session)
kill \\$limit
echo F >$job/job_state
END
cat >"$job/end" <<END
pkill -TERM -s \\$(cat $job/session)
while [ \\$SECONDS -lt 60 ]; do pgrep -s \\$(cat $job/session) >/dev/null || exit 0; sleep 0.5; done
pkill -KILL -s \\$(cat $job/session)
END
ssh "${{nodes[0]}}" "setsid bash -l $job/run >/dev/null 2>&1 </dev/null &"
echo "$number.pbs"
"""

QSTAT = """#!/bin/bash
# qstat -x -f JOB
job={folder}/pbs/${{3%%.*}}
[ -d "$job" ] || {{ echo "qstat: Unknown Job Id $3" >&2; exit 153; }}
printf 'Job Id: %s\\n    job_state = %s\\n' "$3" "$(cat "$job/job_state")"
"""

QDEL = """#!/bin/bash
# qdel JOB: asks for the end and does not wait for it
job={folder}/pbs/${{1%%.*}}
ssh "$(head -n 1 "$job/nodes")" "setsid bash $job/end >/dev/null 2>&1 </dev/null &"
"""


def write_ibrun(folder: Path, mpiexec: Path) -> Path:
    """Return a folder for PATH with `ibrun`, which starts ranks by `mpiexec` (MPICH's)."""
    return _programs(folder, {"ibrun": IBRUN.format(folder=folder, mpiexec=mpiexec)})


def write_pbs(folder: Path, nodes: Sequence[str]) -> Path:
    """Return a folder for PATH with `qsub`, `qstat` and `qdel` of a PBS that has `nodes`."""
    texts = {"qsub": QSUB, "qstat": QSTAT, "qdel": QDEL}
    return _programs(folder, {name: text.format(folder=folder, nodes=" ".join(nodes)) for name, text in texts.items()})


def _programs(folder: Path, texts: dict[str, str]) -> Path:
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return programs

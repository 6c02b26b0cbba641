#!/bin/bash
#SBATCH --job-name=evidence-lab-4n
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=30
#SBATCH --signal=USR1@300
#SBATCH --output=/home/student/studies/evidence-lab/jobs/4-nodes/log-%j.txt
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --cpus-per-task=4
# Written by `hpcdl submit`. One hpcdl process runs here, on the first node; it starts the ranks with srun.
# A site may keep a template of its own as jobs/slurm.sh beside its site.toml.

export HPCDL_LAUNCHER=slurm
export HPCDL_STOP_AT=$(($(date +%s) + 1500))
# The same by the node's uptime, which nobody sets: it counts on this node.
{ read -r boot; read -r uptime _; } < <(cat /proc/sys/kernel/random/boot_id /proc/uptime)
export HPCDL_STOP_UPTIME="$HPCDL_STOP_AT $boot $((${uptime%.*} + 1500))"
until_done=yes
max_requeues=20
cancelled=/home/student/studies/evidence-lab/jobs/4-nodes/cancelled

cd /home/student || exit 1
/opt/apps/hpcdl/bin/python -P -m hpcdl sweep studies/evidence-lab/study.toml --only-nodes 4 --out studies/evidence-lab/4-nodes --resume
code=$?

# 75: stopped early with something to resume (the warning before the time limit). Only a job that still runs continues:
# one that was cancelled is no longer RUNNING.
if [ "$code" -eq 75 ] && [ "$until_done" = yes ] && [ ! -e "$cancelled" ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
        echo "hpcdl: requeued $max_requeues times already; continue with \`hpcdl submit\` again" >&2
    elif [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        echo "hpcdl: requeueing job $SLURM_JOB_ID to continue" >&2
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"

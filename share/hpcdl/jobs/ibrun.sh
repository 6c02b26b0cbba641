#!/bin/bash
@DIRECTIVES@
# Written by `hpcdl submit`. One hpcdl process runs here, on the first node; it starts the ranks with ibrun.
# A site may keep a template of its own as jobs/ibrun.sh beside its site.toml.

@ENVIRONMENT@
export HPCDL_STOP_AT=$(($(date +%s) + @SECONDS@))
# The same by the node's uptime, which nobody sets: it counts on this node.
{ read -r boot; read -r uptime _; } < <(cat /proc/sys/kernel/random/boot_id /proc/uptime)
export HPCDL_STOP_UPTIME="$HPCDL_STOP_AT $boot $((${uptime%.*} + @SECONDS@))"
until_done=@UNTIL_DONE@
max_requeues=@MAX_REQUEUES@
cancelled=@CANCELLED@

cd @FOLDER@ || exit 1
@COMMAND@
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

#!/bin/bash
@DIRECTIVES@
# Written by `hpcdl submit`. One hpcdl process runs here, on the first node; it starts the ranks with mpiexec.
# A site may keep a template of its own as jobs/lsf.sh beside its site.toml.

@ENVIRONMENT@
export HPCDL_STOP_AT=$(($(date +%s) + @SECONDS@))
# The same by the node's uptime, which nobody sets: it counts on this node.
{ read -r boot; read -r uptime _; } < <(cat /proc/sys/kernel/random/boot_id /proc/uptime)
export HPCDL_STOP_UPTIME="$HPCDL_STOP_AT $boot $((${uptime%.*} + @SECONDS@))"

# bkill sends SIGINT and SIGTERM to this shell and to hpcdl, and kills what is left some seconds later: the shell waits.
trap : INT TERM

cd @FOLDER@ || exit 1
@COMMAND@ >@LOG@ 2>&1
exit $?

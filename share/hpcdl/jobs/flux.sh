#!/bin/bash
@DIRECTIVES@
# Written by `hpcdl submit`. One hpcdl process runs here, on the first node; it starts the ranks with `flux run`.
# A site may keep a template of its own as jobs/flux.sh beside its site.toml.

@ENVIRONMENT@
export HPCDL_STOP_AT=$(($(date +%s) + @SECONDS@))
# The same by the node's uptime, which nobody sets: it counts on this node.
{ read -r boot; read -r uptime _; } < <(cat /proc/sys/kernel/random/boot_id /proc/uptime)
export HPCDL_STOP_UPTIME="$HPCDL_STOP_AT $boot $((${uptime%.*} + @SECONDS@))"

cd @FOLDER@ || exit 1
@COMMAND@
exit $?

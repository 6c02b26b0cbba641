#!/bin/sh
# Makes docs/example-report anew, raw records included: `sh scripts/example-report.sh FOLDER`, from the checkout's root.
# FOLDER takes the shards and the whole study; called again after an interruption it goes on.
set -eu
root=$(pwd)
kept="$root/docs/example-report"
folder=${1:?name a folder for the study}
mkdir -p "$folder"
cd "$folder"
export HPCDL_MACHINE="two cores of a virtual machine"
test -f digits/manifest.json ||
    hpcdl shard "$root/share/hpcdl/examples/digits" digits --image-size 28 --split train=0.8,val=0.2
resume=
test -f example/study.json && resume=--resume
hpcdl sweep "$kept/study.toml" --out example $resume
hpcdl report example --out report --anonymous
rm -rf "$kept/study" "$kept/report"
cp -R report "$kept/report"
for record in study.json train.toml $(cd example && ls -d runs/*/record.json runs/*/run.toml runs/*/metrics.jsonl failed/*/record.json 2>/dev/null); do
    mkdir -p "$kept/study/$(dirname "$record")"
    cp "example/$record" "$kept/study/$record"
done

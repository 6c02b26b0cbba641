#!/bin/bash
# Written by `hpcdl submit --dry-run`: to be run on this node.

@ENVIRONMENT@
cd @FOLDER@ || exit 1
@COMMAND@

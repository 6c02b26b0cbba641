#!/bin/bash
# Written by `hpcdl submit --dry-run`: to be run on the first host of $HPCDL_HOSTFILE.

@ENVIRONMENT@
cd @FOLDER@ || exit 1
@COMMAND@

#!/usr/bin/env bash
# Runs one rank of a job. The files in MEGAPPO_RANK_LOGS contain its output, its exit code and its node. megappo receives
# signals because it is in the process group of this shell. The shell survives the signals to write the exit code.
# MEGAPPO_PROGRAM selects a different Python module than megappo.
set -uo pipefail
rank=${RANK:-$SLURM_PROCID}
trap : HUP INT TERM USR1 USR2
echo "${SLURMD_NODENAME:-$(hostname)}" >"$MEGAPPO_RANK_LOGS/node-$rank"
source "$(dirname "${BASH_SOURCE[0]}")/site.sh"
if ! source_site >>"$MEGAPPO_RANK_LOGS/rank-$rank.log" 2>&1; then
    echo 2 >"$MEGAPPO_RANK_LOGS/exit-$rank"
    exit 2
fi
if [ -n "${MEGAPPO_STOP_FILE:-}" ]; then # torchrun started this rank; see node.sh
    echo $$ >"$MEGAPPO_RANK_LOGS/pid-$rank"
    export MEGAPPO_AGENT_PID=$PPID # the rank ends with this process
    if [ -e "$MEGAPPO_STOP_FILE" ]; then
        echo 85 >"$MEGAPPO_RANK_LOGS/exit-$rank"
        exit 0
    fi
fi
"${MEGAPPO_PYTHON:-python}" -m "${MEGAPPO_PROGRAM:-megappo}" "$@" >>"$MEGAPPO_RANK_LOGS/rank-$rank.log" 2>&1
code=$?
echo "$code" >"$MEGAPPO_RANK_LOGS/exit-$rank"
if [ "$code" = 85 ]; then
    exit 0 # after a failure, srun would kill the other ranks; a requested requeue is not a failure
fi
exit "$code"

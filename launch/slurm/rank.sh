#!/usr/bin/env bash
# One rank of a job. Its output, its exit code and its node go to files in MEGAPPO_RANK_LOGS. Signals reach megappo because it
# is in this shell's process group; the shell outlives them to write down the exit code. MEGAPPO_PROGRAM names another Python
# module than megappo.
set -uo pipefail
rank=${RANK:-$SLURM_PROCID}
trap : HUP INT TERM USR1 USR2
echo "${SLURMD_NODENAME:-$(hostname)}" >"$MEGAPPO_RANK_LOGS/node-$rank"
source "$(dirname "${BASH_SOURCE[0]}")/site.sh"
if ! source_site >>"$MEGAPPO_RANK_LOGS/rank-$rank.log" 2>&1; then
    echo 2 >"$MEGAPPO_RANK_LOGS/exit-$rank"
    exit 2
fi
if [ -n "${MEGAPPO_STOP_FILE:-}" ]; then # torchrun stands between SLURM and this rank; see node.sh
    echo $$ >"$MEGAPPO_RANK_LOGS/pid-$rank"
    export MEGAPPO_AGENT_PID=$PPID # with which it ends
    if [ -e "$MEGAPPO_STOP_FILE" ]; then
        echo 85 >"$MEGAPPO_RANK_LOGS/exit-$rank"
        exit 0
    fi
fi
"${MEGAPPO_PYTHON:-python}" -m "${MEGAPPO_PROGRAM:-megappo}" "$@" >>"$MEGAPPO_RANK_LOGS/rank-$rank.log" 2>&1
code=$?
echo "$code" >"$MEGAPPO_RANK_LOGS/exit-$rank"
if [ "$code" = 85 ]; then
    exit 0 # asking for a requeue is no failure for which srun should kill the other ranks
fi
exit "$code"

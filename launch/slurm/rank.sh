#!/usr/bin/env bash
# One rank of a job. Its output and its exit code go to files in MEGAPPO_RANK_LOGS. Signals reach megappo because it is
# in this shell's process group; the shell outlives them to write down the exit code. MEGAPPO_PROGRAM names another Python
# module than megappo.
set -uo pipefail
rank=${RANK:-$SLURM_PROCID}
trap : HUP INT TERM USR1 USR2
if [ -n "${MEGAPPO_SITE:-}" ]; then
    if [ ! -r "$MEGAPPO_SITE" ]; then
        echo "megappo: error: MEGAPPO_SITE is '$MEGAPPO_SITE', must be a readable file on $(hostname)" \
            >>"$MEGAPPO_RANK_LOGS/rank-$rank.log"
        echo 2 >"$MEGAPPO_RANK_LOGS/exit-$rank"
        exit 2
    fi
    set +u # `export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH` reads a variable that may not be set
    # shellcheck source=/dev/null
    source "$MEGAPPO_SITE" >>"$MEGAPPO_RANK_LOGS/rank-$rank.log" 2>&1
    set -u
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

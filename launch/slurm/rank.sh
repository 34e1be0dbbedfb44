#!/usr/bin/env bash
# One rank of a job. Its output and its exit code go to files in MEGAPPO_RANK_LOGS. Signals reach megappo because it is
# in this shell's process group; the shell outlives them to write down the exit code.
set -uo pipefail
rank=${RANK:-$SLURM_PROCID}
trap : HUP INT TERM USR1 USR2
if [ -n "${MEGAPPO_SITE:-}" ]; then
    source "$MEGAPPO_SITE"
fi
python -m megappo "$@" >>"$MEGAPPO_RANK_LOGS/rank-$rank.log" 2>&1
code=$?
echo "$code" >"$MEGAPPO_RANK_LOGS/exit-$rank"
if [ "$code" = 85 ]; then
    exit 0 # asking for a requeue is no failure for which srun should kill the other ranks
fi
exit "$code"

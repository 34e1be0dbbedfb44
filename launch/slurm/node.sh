#!/usr/bin/env bash
# Runs torchrun on one node of a job. Ranks are in the order of nodes. Usage: node.sh NODES RANKS_PER_NODE WORDS...
# The exit code of this task follows from the exit codes of its ranks. torchrun's agents fail after a lost connection or a
# signal, even if all ranks end normally, and srun kills the ranks of other nodes after a failed task. This script sends
# SIGUSR1 directly to the ranks, because torchrun would kill them 30 seconds later.
set -uo pipefail
nodes=$1 ranks=$2
shift 2
first=$((SLURM_NODEID * ranks))
stop=$MEGAPPO_RANK_LOGS/stop-$SLURM_NODEID
restore='import os, signal, sys; signal.signal(signal.SIGUSR1, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])'

forward() {
    local rank
    touch "$stop" # for ranks that start later
    for rank in $(seq "$first" $((first + ranks - 1))); do
        # torchrun starts each rank in a separate process group, whose leader is the shell of the rank.
        [ ! -s "$MEGAPPO_RANK_LOGS/pid-$rank" ] || kill -USR1 -- "-$(cat "$MEGAPPO_RANK_LOGS/pid-$rank")" 2>/dev/null
    done
}

unset "${!PET_@}" # torchrun's options from a scheduler
trap forward USR1
trap : HUP INT TERM # torchrun also receives these signals, and stops its ranks
(
    trap '' USR1
    MEGAPPO_STOP_FILE=$stop exec "${MEGAPPO_PYTHON:-python}" -m megappo.runtime.torchrun --nnodes "$nodes" --node-rank "$SLURM_NODEID" \
        --nproc-per-node "$ranks" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
        --no-python "${MEGAPPO_PYTHON:-python}" -c "$restore" bash "$(dirname "${BASH_SOURCE[0]}")/rank.sh" "$@"
) &
agent=$!
code=0
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent" # a signal interrupts it
    code=$?
done
worst=0
for rank in $(seq "$first" $((first + ranks - 1))); do
    found=$(cat "$MEGAPPO_RANK_LOGS/exit-$rank" 2>/dev/null || echo "$((code == 0 ? 1 : code))")
    [ "$found" = 0 ] || [ "$found" = 85 ] || worst=$found
done
exit "$worst"

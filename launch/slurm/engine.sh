#!/usr/bin/env bash
# One task of the engines' step. `engine.sh describe WORDS...` prints how many devices an engine takes, and how many GPUs
# and CPUs the node has; `engine.sh serve WORDS...` runs this task's engine.
set -euo pipefail
action=$1
shift
if [ -n "${MEGAPPO_SITE:-}" ]; then
    source "$MEGAPPO_SITE"
fi
if [ "$action" = describe ]; then
    ranks=$(python -m megappo serve "$@" --ranks)
    echo "$ranks ${SLURM_GPUS_ON_NODE:-0} ${SLURM_CPUS_ON_NODE:-0}"
    exit
fi
index=$((SLURM_NODEID * MEGAPPO_ENGINES_OF_NODE + SLURM_LOCALID))
read -ra ports <<<"$MEGAPPO_ENGINE_PORTS"
exec python -m megappo serve "$@" "rollout.sglang.first_device=$((SLURM_LOCALID * MEGAPPO_ENGINE_RANKS))" \
    --host "$MEGAPPO_ENGINE_HOST" --port "${ports[index]}" --index "$index" --linger "$MEGAPPO_ENGINE_LINGER" \
    >>"$MEGAPPO_RANK_LOGS/engine-$index.log" 2>&1

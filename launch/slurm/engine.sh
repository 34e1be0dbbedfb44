#!/usr/bin/env bash
# One task of the engines' step. `engine.sh describe WORDS...` prints over how many nodes an engine stands, how many devices
# of each it takes, and how many GPUs and CPUs the node has; `engine.sh serve WORDS...` runs this task's engine, or its part
# of one.
set -euo pipefail
action=$1
shift
if [ -n "${MEGAPPO_SITE:-}" ]; then
    if [ ! -r "$MEGAPPO_SITE" ]; then
        echo "megappo: error: MEGAPPO_SITE is '$MEGAPPO_SITE', must be a readable file on $(hostname)" >&2
        exit 2
    fi
    set +eu # the file may read variables that are not set, and may end with a test
    # shellcheck source=/dev/null
    source "$MEGAPPO_SITE"
    set -eu
fi
if [ "$action" = describe ]; then
    ranks=$("${MEGAPPO_PYTHON:-python}" -m megappo serve "$@" --ranks)
    echo "$ranks ${SLURM_GPUS_ON_NODE:-0} ${SLURM_CPUS_ON_NODE:-0}"
    exit
fi
index=$((SLURM_NODEID / MEGAPPO_ENGINE_WIDTH * MEGAPPO_ENGINES_OF_NODE + SLURM_LOCALID))
part=$((SLURM_NODEID % MEGAPPO_ENGINE_WIDTH))
read -ra ports <<<"$MEGAPPO_ENGINE_PORTS"
read -ra meetings <<<"$MEGAPPO_ENGINE_MEETINGS"
read -ra addresses <<<"$MEGAPPO_ENGINE_ADDRESSES"
port=${ports[index]} log=engine-$index options=()
if [ "$MEGAPPO_ENGINE_WIDTH" -gt 1 ]; then
    options=(--part "$part" --meet "${meetings[index]}")
fi
if [ "$part" != 0 ]; then
    port=0 log=engine-$index-part-$part # receives no requests
fi
exec "${MEGAPPO_PYTHON:-python}" -m megappo serve "$@" "rollout.sglang.first_device=$((SLURM_LOCALID * MEGAPPO_ENGINE_RANKS))" \
    --host "${MEGAPPO_ENGINE_HOST:-${addresses[SLURM_NODEID]}}" --port "$port" --index "$index" --linger "$MEGAPPO_ENGINE_LINGER" "${options[@]}" \
    >>"$MEGAPPO_RANK_LOGS/$log.log" 2>&1

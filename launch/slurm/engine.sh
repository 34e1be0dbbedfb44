#!/usr/bin/env bash
# A task of the engine step. `engine.sh describe WORDS...` prints the number of nodes of an engine, its number of devices on
# each node, and the number of GPUs and CPUs of the node. `engine.sh serve WORDS...` runs the engine of this task, or its
# part of an engine.
set -euo pipefail
action=$1
shift
source "$(dirname "${BASH_SOURCE[0]}")/site.sh"
source_site >&2
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
exec "${MEGAPPO_PYTHON:-python}" -m megappo serve "$@" "rollout.servers.first_device=$((SLURM_LOCALID * MEGAPPO_ENGINE_RANKS))" \
    --host "${MEGAPPO_ENGINE_HOST:-${addresses[SLURM_NODEID]}}" --port "$port" --index "$index" --linger "$MEGAPPO_ENGINE_LINGER" "${options[@]}" \
    >>"$MEGAPPO_RANK_LOGS/$log.log" 2>&1

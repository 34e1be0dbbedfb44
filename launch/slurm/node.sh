#!/usr/bin/env bash
# torchrun on one node of a job, node order being rank order. Usage: node.sh NODES RANKS_PER_NODE WORDS...
set -euo pipefail
nodes=$1 ranks=$2
shift 2
exec python -m torch.distributed.run --nnodes "$nodes" --node-rank "$SLURM_NODEID" --nproc-per-node "$ranks" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --no-python bash "$(dirname "${BASH_SOURCE[0]}")/rank.sh" "$@"

#!/usr/bin/env bash
# Runs megappo on the processes of one machine. Usage: launch/torchrun.sh PROCESSES train CONFIG [key=value ...]
# Several machines: start torchrun yourself with --nnodes, --node-rank and --rdzv-endpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
processes=$1
shift
exec python -m torch.distributed.run --standalone --nproc-per-node "$processes" -m megappo "$@"

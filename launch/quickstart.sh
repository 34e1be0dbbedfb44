#!/usr/bin/env bash
# Trains a small model from random weights on single-digit sums: PPO with a critic, actor under TP2, critic under PP2,
# on two processes of this machine. Usage: launch/quickstart.sh [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$ROOT"
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
python -m torch.distributed.run --standalone --nproc-per-node 2 -m megappo \
    train configs/quickstart.yaml "run.directory=$run" "$@"
python -m megappo report "$run"

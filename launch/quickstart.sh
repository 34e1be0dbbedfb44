#!/usr/bin/env bash
# Trains a small model from random weights on single-digit sums: PPO with a critic, actor under TP2, critic under PP2,
# on two processes of this machine. Usage: launch/quickstart.sh [key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment "$(environment_for "$ROOT/configs/quickstart.yaml" "$@")"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # nothing here is another machine's business
cd "$ROOT"
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
launch/torchrun.sh 2 train configs/quickstart.yaml "run.directory=$run" "$@"
python -m megappo report "$run"

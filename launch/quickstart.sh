#!/usr/bin/env bash
# Trains a small model from random weights on single-digit sums: PPO with a critic, actor under TP2, critic under PP2,
# on two processes of this machine; the run is in ./runs. Usage: launch/quickstart.sh [key=value ...]
# `megappo quickstart` runs this file, also where pip installed megappo.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment "$(environment_for "$ROOT/configs/quickstart.yaml" "$@")"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # nothing here is another machine's business
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
"$ROOT/launch/torchrun.sh" 2 train "$ROOT/configs/quickstart.yaml" "run.directory=$run" \
    "model.path=$ROOT/configs/models/tiny_arithmetic" "$@"
python -m megappo report "$run"

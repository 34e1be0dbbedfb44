#!/usr/bin/env bash
# Trains a small model from random weights on single-digit sums with PPO and a critic, on two processes of this machine.
# The actor uses TP2, the critic PP2. With one GPU there is one process and no split, because NCCL needs a separate GPU for
# each process. The run is in ./runs/quickstart-TIME, or in the folder of run.directory or run.name.
# Usage: launch/quickstart.sh [key=value ...]
# `megappo quickstart` runs this file, also in an environment in which pip installed megappo.
set -euo pipefail
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
directory=("run.directory=$run") named=
for word; do
    value=${word#*=} value=${value#[\"\']} value=${value%[\"\']}
    case $word in
    run.directory=*) run=$value named=directory directory=() ;;
    run.name=*) [ "$named" = directory ] || run=runs/$value directory=() ;;
    -h | --help)
        echo "usage: launch/quickstart.sh [key=value ...], for example run.steps=10 run.name=first; it trains a small model" \
            "on two processes, and shows its curve"
        exit
        ;;
    -*)
        echo "megappo: error: '$word' is an option, but the quickstart accepts only settings such as run.steps=10; use" \
            "launch/torchrun.sh 2 train configs/quickstart.yaml $word for options of train" >&2
        exit 2
        ;;
    esac
done
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment "$(environment_for "$ROOT/configs/quickstart.yaml" "$@")"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # all processes are on this machine
processes=2 layouts=()
if [ "$(gpus_here)" = 1 ]; then
    processes=1 layouts=(actor.layout.tensor_parallel=1 critic.layout.pipeline_parallel=1)
    echo "megappo: this machine shows one GPU, so actor and critic are not split over two processes" >&2
fi
"$ROOT/launch/torchrun.sh" "$processes" train "$ROOT/configs/quickstart.yaml" "${directory[@]}" \
    "model.path=$ROOT/configs/models/tiny_arithmetic" \
    "logging.save_experience={steps: [1, 40, 80, 120, 160], samples: 64}" "${layouts[@]}" "$@" # for `megappo inspect`
"${MEGAPPO_PYTHON:-python}" -m megappo report "$run"

#!/usr/bin/env bash
# Runs megappo on the processes of one machine. With --nodes, start the same command on each of several machines.
# Usage: launch/torchrun.sh [--nodes N --head HOST:PORT] PROCESSES_PER_MACHINE train CONFIG [key=value ...]
set -euo pipefail
usage() {
    echo "megappo: error: $1; usage: launch/torchrun.sh [--nodes N --head HOST:PORT] PROCESSES train CONFIG ..." >&2
    exit 2
}
nodes=1 head=
while [ $# -gt 0 ]; do
    case $1 in
        --nodes) nodes=${2:-} && shift 2 || usage "--nodes needs a number" ;;
        --head) head=${2:-} && shift 2 || usage "--head needs HOST:PORT" ;;
        *) break ;;
    esac
done
[[ $nodes =~ ^[1-9][0-9]*$ ]] || usage "--nodes is '$nodes', must be a whole number from 1"
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage "the processes per machine are '${1:-}', must be a whole number from 1"
[ "$nodes" = 1 ] || [[ $head =~ ^([^:]+|\[[0-9a-fA-F:.]+\]):[0-9]+$ ]] ||
    usage "--head is '$head', must be HOST:PORT of one of the machines, or [ADDRESS]:PORT for IPv6"
processes=$1
shift
[[ ${1:-.yaml} != *.y*ml ]] || usage "the command is missing; write $processes train ${1:-CONFIG}"
# torchrun reads missing options from these variables. Schedulers such as Kubeflow set them.
if [ "${PET_NNODES:-1}" != 1 ] && [ "${PET_NNODES:-1}" != 1:1 ] && [ "${PET_NNODES:-1}" != "$nodes" ]; then
    usage "PET_NNODES is '$PET_NNODES', and --nodes is $nodes; give --nodes and --head, or unset PET_NNODES"
fi
unset "${!PET_@}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment "$(environment_for "$@")"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "$nodes" = 1 ]; then
    # Equivalent to --standalone, but without torchrun's stores, which listen on every interface. The rendezvous is a
    # file, and rank 0 of megappo serves the ranks on the loopback interface.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    rendezvous=(--rdzv-backend c10d --rdzv-conf store_type=file --rdzv-id "megappo-$$" --local-addr 127.0.0.1)
else
    # The id is equal on all machines, and differs from the ids of other users and runs.
    id=megappo-$(id -un)-$(printf '%s\n' "$nodes" "$head" "$processes" "$@" | sha256sum | cut -c1-16)
    rendezvous=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$head" --rdzv-id "$id")
fi
exec "${MEGAPPO_PYTHON:-python}" -m megappo.runtime.torchrun "${rendezvous[@]}" --nproc-per-node "$processes" -m megappo "$@"

#!/usr/bin/env bash
# Run a command on two virtual machines as rank 0 and rank 1. Networks, host names and /etc/hosts are separate:
#   unshare --net --mount --uts two_nodes.sh FOLDER COMMAND ...
# Each machine resolves its own name to 127.0.1.1, which is the default of Ubuntu. The name of the other machine
# resolves to an address in their common network.
set -euo pipefail
folder=$1
if [ -z "${RANK:-}" ]; then
    RANK=1 unshare --net --mount --uts "$0" "$@" &
    other=$!
    trap 'kill $other 2>/dev/null || true' EXIT
    until [ -e "$folder/ready" ]; do sleep 0.05; done
    ip link add wire0 type veth peer name wire1
    ip link set wire1 netns "$(<"$folder/ready")"
    RANK=0
else
    echo $$ >"$folder/ready.new"
    mv "$folder/ready.new" "$folder/ready"
    until ip link show wire1 >"$folder/link" 2>&1; do sleep 0.05; done
fi
shift
hostname "node$RANK"
for node in 0 1; do
    [ "$node" = "$RANK" ] && echo "127.0.1.1 node$node" || echo "10.99.0.1$node node$node"
done >"$folder/hosts$RANK"
mount --bind "$folder/hosts$RANK" /etc/hosts
ip link set lo up
ip address add "10.99.0.1$RANK/24" dev "wire$RANK"
ip address add "fd99::1$RANK/64" dev "wire$RANK" nodad
ip link set "wire$RANK" up
export RANK WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
"$@"
[ -z "${other:-}" ] || wait "$other"

#!/usr/bin/env bash
# Builds the environment and runs every check and test. `--quick` leaves out the long training runs; everything else is
# handed to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
ensure_environment full
cd "$ROOT"

# For tests/slurm, which say what is missing and are skipped where this cannot install it.
install_slurm() {
    if type slurmctld slurmd munged >/dev/null 2>&1 || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        return
    fi
    echo "installing slurm-wlm and munge for tests/slurm"
    export DEBIAN_FRONTEND=noninteractive
    local install=(timeout 300 apt-get install -y -qq --no-install-recommends slurm-wlm munge)
    { "${install[@]}" || { timeout 120 apt-get update -qq && "${install[@]}"; }; } >/dev/null 2>&1 ||
        echo "slurm-wlm and munge could not be installed"
}
PATH="$PATH:/usr/sbin:/sbin"
install_slurm
selection=()
if [ "${1:-}" = --quick ]; then
    shift
    selection=(-m "not slow")
fi
ruff check .
ruff format --check .
mypy
if [ $# -gt 0 ]; then
    exec python -m pytest tests "${selection[@]}" "$@"
fi
# Servers and SLURM jobs are mostly waited for, so their tests run beside the others; what they say is shown at the end.
export OMP_WAIT_POLICY=passive # threads of one do not take the cores of the other while they wait
said=$(mktemp)
python -m pytest tests/slurm tests/sglang "${selection[@]}" >"$said" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true; rm -f "$said"' EXIT
code=0
python -m pytest tests --ignore tests/slurm --ignore tests/sglang "${selection[@]}" || code=$?
wait "$beside" || code=$?
cat "$said"
exit "$code"

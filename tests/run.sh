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
python -m pytest tests "${selection[@]}" "$@"

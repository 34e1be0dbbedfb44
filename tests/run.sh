#!/usr/bin/env bash
# Builds the environment and runs the checks of the code, and tests:
#   tests/run.sh                        every test
#   tests/run.sh --quick                what is quick of every file
#   tests/run.sh --affected [FILE...]   what is quick of the tests nearest to these files, or to what differs from main
#   tests/run.sh WORD...                what these words choose, which are pytest's
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
quick=()
runs=(tests/distributed/test_{family_runs,in_flight_runs,resume,start_from,stops,training}.py)
beside=(tests/slurm tests/sglang "${runs[@]}") # which take about as long as the others
here=(tests/unit tests/gpu)
for file in tests/distributed/test_*.py; do
    [[ " ${runs[*]} " = *" $file "* ]] || here+=("$file")
done
case "${1:-}" in
--quick)
    shift
    quick=(--quick)
    beside=(tests/slurm tests/sglang tests/distributed)
    here=(tests/gpu)
    for file in tests/unit/test_*.py; do # of which nearly everything is quick, and each side takes every other one
        if ((${#here[@]} <= ${#beside[@]})); then here+=("$file"); else beside+=("$file"); fi
    done
    ;;
--affected)
    shift
    quick=(--quick)
    nearest=$(python tests/affected.py "$@")
    mapfile -t beside < <(grep -v '^tests/unit/' <<<"$nearest")
    mapfile -t here < <(grep '^tests/unit/' <<<"$nearest")
    set --
    ;;
esac
ruff check .
ruff format --check .
mypy
if [ $# -gt 0 ]; then
    exec python -m pytest "${quick[@]}" "$@"
fi
if [[ ${beside[*]} = *tests/slurm* ]]; then
    PATH="$PATH:/usr/sbin:/sbin"
    install_slurm
fi
run() { # pytest's code 5: of these tests nothing is quick
    [ $# = 0 ] || python -m pytest "${quick[@]}" "$@" || [ $? = 5 ]
}
# Two sides at a time, as servers, jobs and ranks are mostly waited for; what the one says is shown at the end.
export OMP_WAIT_POLICY=passive # threads of one do not take the cores of the other while they wait
said=$(mktemp)
run "${beside[@]}" >"$said" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null || true; rm -f "$said"' EXIT
code=0
run "${here[@]}" || code=$?
wait "$other" || code=$?
cat "$said"
exit "$code"

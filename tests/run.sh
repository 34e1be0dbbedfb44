#!/usr/bin/env bash
# Builds the environment and runs the checks of the code, and tests:
#   tests/run.sh                        every test but what is exhaustive
#   tests/run.sh --all                  that, too
#   tests/run.sh --exhaustive [FILE...] nothing else
#   tests/run.sh --quick                what is quick of every file
#   tests/run.sh --light                what depends on versions, in the light environment of Python 3.11
#   tests/run.sh --affected [FILE...]   what is quick of the tests nearest to these files, or to what differs from main
#   tests/run.sh WORD...                what these words choose, which are pytest's
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
ensure_environment full
cd "$ROOT"
if [ "${1:-}" = --light ]; then
    export MEGAPPO_PYTHON_VERSION=3.11
    if [ -n "${MEGAPPO_PYTHON:-}" ] || ! find_python light >/dev/null 2>&1; then
        echo "not tested: Megatron-Core 0.16, which needs a Python 3.11 that environments can be made with"
        exit 0
    fi
    MEGAPPO_OTHER_PYTHON=$(command -v "${MEGAPPO_PYTHON:-python}") # of the full environment
    export MEGAPPO_OTHER_PYTHON
    ensure_environment light-alone
fi

# Packages for tests that say what is missing, and are skipped where this cannot install it.
install_for_tests() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        return
    fi
    echo "installing $* for tests"
    export DEBIAN_FRONTEND=noninteractive
    local install=(timeout 300 apt-get install -y -qq --no-install-recommends "$@")
    { "${install[@]}" || { timeout 120 apt-get update -qq && "${install[@]}"; }; } >/dev/null 2>&1 ||
        echo "$* could not be installed"
}
# wandb for tests/observe, in a folder beside the environment: runs ask for it, and few users have it.
install_wandb() {
    local folder
    folder=$(environment_cache)/test-wandb-0.31.0-$("${MEGAPPO_PYTHON:-python}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ ! -e "$folder/complete" ]; then
        echo "installing wandb for tests"
        timeout 300 "${MEGAPPO_PYTHON:-python}" -m pip install -q --target "$folder" wandb==0.31.0 >/dev/null 2>&1 &&
            touch "$folder/complete" || echo "wandb could not be installed"
    fi
    [ ! -e "$folder/complete" ] || export MEGAPPO_TEST_WANDB=$folder
}
ruff check .
ruff format --check .
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive # cores are shared, and threads that wait do not take them
export TRITON_INTERPRET=1
unset PYTHONDONTWRITEBYTECODE # with it, each of some hundred processes would compile all that it imports
case "${1:-}" in
"" | --all | --exhaustive)
    PATH="$PATH:/usr/sbin:/sbin"
    type slurmctld slurmd munged >/dev/null 2>&1 || install_for_tests slurm-wlm munge
    type chromium >/dev/null 2>&1 || install_for_tests chromium
    install_wandb
    exec "${MEGAPPO_PYTHON:-python}" -m tests.house.suite "$@"
    ;;
--quick) exec "${MEGAPPO_PYTHON:-python}" -m tests.house.suite --quick ;;
--light) exec "${MEGAPPO_PYTHON:-python}" -m tests.house.suite --light ;;
--affected)
    shift
    nearest=$("${MEGAPPO_PYTHON:-python}" -m tests.house.affected "$@")
    mapfile -t files <<<"$nearest"
    [ -n "$nearest" ] || exit 0
    exec "${MEGAPPO_PYTHON:-python}" -m tests.house.suite --quick "${files[@]}"
    ;;
*)
    mypy
    exec "${MEGAPPO_PYTHON:-python}" -m pytest "$@"
    ;;
esac

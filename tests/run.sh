#!/usr/bin/env bash
# Build the environment, check the code, and run tests:
#   tests/run.sh                        all tests except exhaustive tests
#   tests/run.sh --all                  all tests, including exhaustive tests
#   tests/run.sh --exhaustive [FILE...] only exhaustive tests
#   tests/run.sh --quick                quick tests and cases of every file
#   tests/run.sh --light                tests of package versions, in the light environment of Python 3.11
#   tests/run.sh --affected [FILE...]   quick tests of these files (default: all files that differ from main)
#   tests/run.sh WORD...                tests that these arguments of pytest select
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
ensure_environment full
cd "$ROOT"
if [ "${1:-}" = --light ]; then
    export MEGAPPO_PYTHON_VERSION=3.11
    if [ -n "${MEGAPPO_PYTHON:-}" ] || ! find_python light >/dev/null 2>&1; then
        echo "not tested: Megatron-Core 0.16, which requires a Python 3.11 that can create environments"
        exit 0
    fi
    MEGAPPO_OTHER_PYTHON=$(command -v "${MEGAPPO_PYTHON:-python}") # the Python of the full environment
    export MEGAPPO_OTHER_PYTHON
    ensure_environment light-alone
fi

# Install packages for tests. If the installation fails, these tests are skipped with a reason.
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
# Install wandb for tests/observe, in a separate folder, because wandb is not part of the environment.
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
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive # processes share cores, and waiting threads release their core
export TRITON_INTERPRET=1
unset PYTHONDONTWRITEBYTECODE # otherwise hundreds of processes compile the imported modules
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

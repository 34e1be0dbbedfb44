#!/usr/bin/env bash
# Builds the environment and runs every check and test. `--quick` leaves out the long training runs; everything else is
# handed to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
ensure_environment
cd "$ROOT"
selection=()
if [ "${1:-}" = --quick ]; then
    shift
    selection=(-m "not slow")
fi
ruff check .
ruff format --check .
mypy
python -m pytest tests "${selection[@]}" "$@"

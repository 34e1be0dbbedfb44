# Sourced by the other scripts: puts a Python environment with everything in launch/requirements.txt on PATH.
# It lives in a cache folder named by a hash of that file, and replaces the one of an older hash. Set MEGAPPO_PYTHON to
# the interpreter of an environment of your own to use that instead.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT:$ROOT/kernels${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "megappo: error: no Python 3.11 or 3.12 found; install one, or set MEGAPPO_PYTHON" >&2
    return 1
}

ensure_environment() {
    if [ -n "${MEGAPPO_PYTHON:-}" ]; then
        PATH="$(dirname "$MEGAPPO_PYTHON"):$PATH"
        return
    fi
    local python hash base folder
    python=$(find_python) || exit 2
    hash=$({ cat "$ROOT/launch/requirements.txt"; "$python" --version; } | sha256sum | cut -c1-16)
    base=${MEGAPPO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megappo}
    folder=$base/environment-$hash
    mkdir -p "$base"
    exec 9>"$base/lock"
    flock 9
    if [ ! -e "$folder/complete" ]; then
        echo "megappo: building the environment in $folder (a few minutes, once)"
        rm -rf "$base"/environment-*
        "$python" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$ROOT/launch/requirements.txt"
        touch "$folder/complete"
    fi
    flock -u 9
    exec 9>&-
    export VIRTUAL_ENV="$folder"
    PATH="$folder/bin:$PATH"
}

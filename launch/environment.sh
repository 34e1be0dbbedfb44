# Sourced by the other scripts: puts a Python environment with everything in launch/requirements.txt on PATH, or with
# `ensure_environment full` everything in launch/requirements-sglang.txt. It lives in a cache folder named by a hash of
# those files; the full one serves for the light one too, and a new one replaces what was there. Set MEGAPPO_PYTHON to
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

environment_hash() { # requirements file, interpreter
    { cat "$ROOT/launch/$1" "$ROOT/launch/requirements-common.txt"; "$2" --version; } | sha256sum | cut -c1-16
}

environment_for() { # the words of a command line: is SGLang in them, or in a configuration that they name?
    local word
    for word; do
        if [[ $word =~ engine=sglang ]] || { [ -f "$word" ] && grep -q 'engine: *sglang' "$word"; }; then
            echo full
            return
        fi
    done
    echo light
}

ensure_environment() {
    if [ -n "${MEGAPPO_PYTHON:-}" ]; then
        PATH="$(dirname "$MEGAPPO_PYTHON"):$PATH"
        return
    fi
    local python base folder requirements=requirements.txt
    python=$(find_python) || exit 2
    base=${MEGAPPO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megappo}
    folder=$base/environment-$(environment_hash requirements-sglang.txt "$python")
    if [ "${1:-light}" = full ]; then
        requirements=requirements-sglang.txt
    elif [ ! -e "$folder/complete" ]; then
        folder=$base/environment-$(environment_hash requirements.txt "$python")
    fi
    mkdir -p "$base"
    exec 9>"$base/lock"
    flock 9
    if [ ! -e "$folder/complete" ]; then
        echo "megappo: building the environment in $folder (a few minutes, once)"
        rm -rf "$base"/environment-*
        "$python" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$ROOT/launch/$requirements"
        touch "$folder/complete"
    fi
    flock -u 9
    exec 9>&-
    export VIRTUAL_ENV="$folder"
    PATH="$folder/bin:$PATH"
}

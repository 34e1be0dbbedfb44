#!/usr/bin/env bash
# Sourced by the other scripts: puts a Python environment on PATH that can train with the engine inside the trainer, or
# with `ensure_environment full` with SGLang too; the full one serves for the light one. launch/locks lists every file
# in them. They live in a cache folder, named by a hash of the lock, the Python version and the processor, so that clones,
# branches and versions live side by side. Nothing is deleted unless you ask for it:
#   launch/environment.sh prune [DAYS]    removes environments that were not used for DAYS days (default 7)
# On a login node, before jobs start on nodes without a network:
#   launch/environment.sh build [--gpu] [--wheels FOLDER]    builds the environment; --gpu: the full one, for nodes with GPUs
# Set MEGAPPO_PYTHON to the interpreter of your environment to use exactly this file, MEGAPPO_CACHE to keep environments
# elsewhere than in ~/.cache/megappo, MEGAPPO_PYTHON_VERSION to 3.11 or 3.12 to select the Python version.

ROOT=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) # an exported CDPATH has cd print the folder
if [[ $ROOT == */megappo/shipped ]]; then # pip installed this file, in an environment with all packages
    [[ $ROOT =~ ^(.*)/lib(64)?/python3\.[0-9]+/[^/]+/megappo/shipped$ ]] && installed=${BASH_REMATCH[1]}/bin/python
    export MEGAPPO_PYTHON=${MEGAPPO_PYTHON:-${installed:-$(type -P python)}}
else
    export MEGAPPO_LAUNCH="$ROOT/launch" # for the command lines that megappo prints
fi
if [[ $ROOT == *:* ]]; then
    echo "megappo: error: the repository's path '$ROOT' contains a ':', which separates paths in PYTHONPATH; move the repository" >&2
    exit 2
fi
export PYTHONPATH="$ROOT:$ROOT/kernels${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # for scripts that import torch before megappo

# find_python light|full: the interpreter that an environment of this kind is made with. The full set prefers Python
# 3.12, for which there is the Megatron-Core that images for GPUs have; the light one 3.11. MEGAPPO_PYTHON_VERSION
# chooses for both. Interpreters of pyenv and uv count where they are not active, too.
find_python() {
    local version candidate versions="3.12 3.11"
    [ "$1" = full ] || versions="3.11 3.12"
    case "${MEGAPPO_PYTHON_VERSION:=}" in
    "") ;;
    3.11 | 3.12) versions=$MEGAPPO_PYTHON_VERSION ;;
    *)
        echo "megappo: error: MEGAPPO_PYTHON_VERSION is '$MEGAPPO_PYTHON_VERSION'; give 3.11 or 3.12" >&2
        return 1
        ;;
    esac
    for version in $versions; do
        while read -r candidate; do
            if "$candidate" -c "import sys, ensurepip, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" \
                </dev/null 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done < <(python_candidates "$version")
    done
    echo "megappo: error: no Python ${versions// / or } with its venv module found; install one, or set MEGAPPO_PYTHON" >&2
    return 1
}

python_candidates() { # version, such as 3.12
    local folder
    type -ap "python$1" python3 || true
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".* \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}/cpython-$1".*; do
        echo "$folder/bin/python$1"
    done | sort -rV
}

pins_of() { # light|full, interpreter: the file in launch/locks
    local version
    version=$("$2" --version)
    [[ $version =~ [0-9]+\.[0-9]+ ]] && echo "launch/locks/$1-${BASH_REMATCH[0]}.txt"
}

environment_hash() { # light|full, interpreter
    { cat "$ROOT/$(pins_of "$@")"; "$2" --version; uname -m; } | sha256sum | cut -c1-16
}

environment_cache() {
    echo "${MEGAPPO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megappo}"
}

# environment_lock FOLDER: opens the lock of this environment as ENVIRONMENT_LOCK. Whoever builds or removes it holds it
# alone; whoever uses it shares it, with all its children, for as long as one of them lives, on every node.
environment_lock() {
    if [ -e "$1.lock" ] && [ ! -w "$1.lock" ]; then # of a cache that another user keeps; reading is enough to share it
        exec {ENVIRONMENT_LOCK}<"$1.lock"
    else
        exec {ENVIRONMENT_LOCK}<>"$1.lock"
    fi
}

environment_unlock() {
    exec {ENVIRONMENT_LOCK}>&-
}

take_environment_lock() { # flock's option: -s to use, -x to build
    flock "$1" "$ENVIRONMENT_LOCK" || {
        echo "megappo: error: files in $(environment_cache) cannot be locked; set MEGAPPO_CACHE to a folder on another" \
            "file system, or MEGAPPO_PYTHON to an environment of your own" >&2
        return 2
    }
}

environment_for() { # the words of a command line: is SGLang in them, in a configuration that they name, or the default?
    local word
    for word; do
        if [[ $word =~ engine=sglang ]] || { [ -f "$word" ] && grep -q 'engine: *sglang' "$word"; }; then
            echo full
            return
        fi
    done
    for word; do
        if [[ $word =~ engine=transformers ]] || { [ -f "$word" ] && grep -q 'engine: *transformers' "$word"; }; then
            echo light
            return
        fi
    done
    if nvidia-smi -L >/dev/null 2>&1; then # runs on GPUs generate with SGLang where nothing else is said
        echo full
    else
        echo light
    fi
}

gpus_here() { # how many GPUs a process sees
    if [ -n "${CUDA_VISIBLE_DEVICES+given}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    fi
}

# Whether only this user and root can change a folder, where there is one: what lies in it is run.
environment_is_own() {
    [ -z "$(find -L "$1" -maxdepth 0 \( -perm /022 -o -not \( -user "$(id -u)" -o -user 0 \) \) 2>/dev/null)" ]
}

umask_for_own() { # so that nobody else can change these programs, whatever the user's umask is
    umask "$(printf '%04o' $(($(umask) | 022)))"
}

check_environment_owner() { # folders
    local folder
    [ "${MEGAPPO_SHARED_CACHE:-no}" != yes ] || return 0
    for folder; do
        environment_is_own "$folder" || {
            echo "megappo: error: others than you and root can write to $folder, whose programs would be run; chmod go-w" \
                "it, set MEGAPPO_CACHE to a folder of your own, or MEGAPPO_SHARED_CACHE=yes where you trust them" >&2
            return 2
        }
    done
}

named_interpreter() { # the file that MEGAPPO_PYTHON names, by its whole path
    local file
    file=$(type -P -- "$MEGAPPO_PYTHON") || file=""
    if [ ! -f "$file" ] || [ ! -x "$file" ]; then
        echo "megappo: error: MEGAPPO_PYTHON is '$MEGAPPO_PYTHON', must be an executable file; set it to the" \
            "interpreter of an environment, such as /opt/venv/bin/python, or unset it" >&2
        return 2
    fi
    echo "$(CDPATH="" cd -- "$(dirname "$file")" && pwd)/${file##*/}"
}

ensure_environment() { # full, light, or light-alone (light, even if a full environment exists)
    if [ -n "${MEGAPPO_PYTHON:-}" ]; then
        MEGAPPO_PYTHON=$(named_interpreter) || exit 2
        export MEGAPPO_PYTHON # the scripts call this file, and not `python`
        PATH="$(dirname "$MEGAPPO_PYTHON"):$PATH" # to find tools of the environment, such as ruff
        return
    fi
    local python base folder kind=full
    python=$(find_python full) || exit 2
    base=$(environment_cache)
    folder=$base/environment-$(environment_hash full "$python")
    if [ "${1:-light}" = light-alone ] || { [ "${1:-light}" = light ] && [ ! -e "$folder/complete" ]; }; then
        kind=light
        python=$(find_python light) || exit 2
        folder=$base/environment-$(environment_hash light "$python")
    fi
    (umask_for_own && mkdir -p "$base")
    check_environment_owner "$base" "$folder" "$folder/bin" || exit 2
    environment_lock "$folder"
    take_environment_lock -s || exit 2
    while [ ! -e "$folder/complete" ]; do
        # Unlocked first: on NFS two that share the lock and both want it alone would wait for each other. Meanwhile
        # another process may build the environment, so this one looks again.
        flock -u "$ENVIRONMENT_LOCK"
        take_environment_lock -x || exit 2
        if [ ! -e "$folder/complete" ] && ! (umask_for_own && build_environment "$folder" "$python" "$kind"); then
            echo "megappo: error: the environment in $folder could not be built; see above" >&2
            exit 2
        fi
        take_environment_lock -s || exit 2
    done
    touch "$folder/complete" 2>/dev/null || true # notes the last use for prune; fails in a cache that another user owns
    export VIRTUAL_ENV="$folder"
    PATH="$folder/bin:$PATH"
}

PIP_PIN="pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"

# What `du` says of a built environment, with a margin for what pip unpacks beside it.
declare -A ENVIRONMENT_GIB=([light]=4 [full]=13)

check_space_for() { # folder, light|full
    local free
    free=$(df -Pk "$1" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge $((ENVIRONMENT_GIB[$2] * 1024 * 1024)) ] || {
        echo "megappo: error: $1 has $((free / 1024)) MiB free, and a $2 environment needs about ${ENVIRONMENT_GIB[$2]} GiB;" \
            "free some (launch/environment.sh prune removes old environments), or set MEGAPPO_CACHE to a folder on" \
            "another file system" >&2
        return 2
    }
}

build_environment() { # folder, interpreter, light|full
    local pins
    pins=$(pins_of "$3" "$2")
    rm -rf "$1" # what a build that was interrupted left
    check_space_for "${1%/*}" "$3" || return
    echo "megappo: building the environment of $pins in $1 with $("$2" --version) from $2 (a few minutes, once)" >&2
    "$2" -m venv "$1" &&
        install_pip "$1/bin/python" &&
        install_pins "$1/bin/python" "$ROOT/$pins" &&
        touch "$1/complete"
}

install_pip() { # interpreter: the one that installs the rest
    "$1" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r <(echo "$PIP_PIN")
}

install_pins() { # interpreter, file: first what has hashes, then what has none, with what its build needs
    local install=("$1" -m pip install --quiet --disable-pip-version-check) bare='^[a-z0-9._-]+==[^ ]+$'
    "${install[@]}" --no-deps --require-hashes -r <(grep -vE "$bare" "$2") || return
    ! grep -qE "$bare" "$2" || "${install[@]}" -r <(grep -E "$bare" "$2")
}

# Whether a process of this machine has files of the folder mapped: one that these scripts did not start holds no lock.
environment_is_mapped() {
    grep -qsF "$1/" /proc/[0-9]*/maps
}

prune_environments() { # days
    [[ $1 =~ ^[0-9]+$ ]] || {
        echo "megappo: error: '$1' is no number of days; usage: launch/environment.sh prune [DAYS]" >&2
        exit 2
    }
    local python folder own="" freed=0 size
    if python=$(find_python light 2>/dev/null); then
        own="environment-$(environment_hash light "$python")"
        python=$(find_python full)
        own+=" environment-$(environment_hash full "$python")"
    fi
    for folder in "$(environment_cache)"/environment-*/; do
        folder=${folder%/}
        [ -d "$folder" ] || continue
        environment_lock "$folder"
        if [[ " $own " == *" ${folder##*/} "* ]]; then
            echo "kept     $folder: this clone uses it"
        elif ! flock -xn "$ENVIRONMENT_LOCK" || environment_is_mapped "$folder"; then
            echo "kept     $folder: it is in use"
        elif [ "$1" -gt 0 ] && [ -n "$(find "$folder/complete" -mtime "-$1" 2>/dev/null)" ]; then
            echo "kept     $folder: it was used in the last $1 days"
        else
            size=$(du -sm "$folder" | cut -f1)
            rm -rf "$folder" # the lock stays: somebody may be waiting for it
            echo "removed  $folder: $size MB"
            freed=$((freed + size))
        fi
        environment_unlock
    done
    echo "$freed MB freed"
}

build_for_nodes() { # [--gpu] [--wheels FOLDER]
    local kind=light wheels
    while [ $# -gt 0 ]; do
        case $1 in
        --gpu) kind=full ;;
        --wheels)
            wheels=$(CDPATH="" cd -- "${2:-/nowhere}" 2>/dev/null && pwd) || {
                echo "megappo: error: --wheels is '${2:-}', must be a folder with wheels" >&2
                exit 2
            }
            # pip reads these variables. A URL may contain no spaces.
            export PIP_NO_INDEX=1 PIP_FIND_LINKS="file://${wheels// /%20}"
            shift
            ;;
        *) environment_usage ;;
        esac
        shift
    done
    if [ -n "${MEGAPPO_PYTHON:-}" ]; then
        echo "megappo: error: MEGAPPO_PYTHON is '$MEGAPPO_PYTHON', so the scripts use this interpreter; unset it to build" \
            "an environment" >&2
        exit 2
    fi
    ensure_environment "$kind"
    echo "built $VIRTUAL_ENV; nodes that see this folder use it"
}

environment_usage() {
    echo "usage: launch/environment.sh build [--gpu] [--wheels FOLDER] | prune [DAYS]" >&2
    exit 2
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    [ $# -gt 0 ] || environment_usage
    command=$1
    shift
    case $command in
    build) build_for_nodes "$@" ;;
    prune) [ $# -le 1 ] || environment_usage; prune_environments "${1:-7}" ;;
    *) environment_usage ;;
    esac
fi

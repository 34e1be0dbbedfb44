#!/usr/bin/env bash
# The other scripts source this file. It puts a Python environment on PATH. The light environment can train with the
# engine inside the trainer. The full environment (`ensure_environment full`) also has SGLang, and replaces the light
# one if it exists. launch/locks lists every file of the environments. They are in a cache folder. Their names are hashes
# of the lock, the Python version and the processor, so different clones, branches and versions do not conflict. This
# command removes environments that were not used for DAYS days (default 7). No other command deletes environments:
#   launch/environment.sh prune [DAYS]
# This command builds an environment on a login node for nodes without a network. --gpu builds the full environment:
#   launch/environment.sh build [--gpu] [--wheels FOLDER]
# Variables: MEGAPPO_PYTHON is the interpreter of an existing environment, which is then used instead. MEGAPPO_CACHE is
# the folder of the environments (default ~/.cache/megappo). MEGAPPO_PYTHON_VERSION selects Python 3.11 or 3.12.

ROOT=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) # with an exported CDPATH, cd would print the folder
if [[ $ROOT == */megappo/shipped ]]; then # pip installed this file in an environment with all packages
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

# find_python light|full: prints the interpreter for a new environment. The full environment prefers Python 3.12, because
# its Megatron-Core is the version of the GPU images. The light environment prefers Python 3.11. MEGAPPO_PYTHON_VERSION
# selects the version of both. Inactive interpreters of pyenv and uv are also found.
find_python() {
    local version candidate versions="3.12 3.11"
    [ "$1" = full ] || versions="3.11 3.12"
    case "${MEGAPPO_PYTHON_VERSION:=}" in
    "") ;;
    3.11 | 3.12) versions=$MEGAPPO_PYTHON_VERSION ;;
    *)
        echo "megappo: error: MEGAPPO_PYTHON_VERSION is '$MEGAPPO_PYTHON_VERSION', must be 3.11 or 3.12; change it" >&2
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

python_candidates() { # version, for example 3.12
    local folder
    type -ap "python$1" python3 || true
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".* \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}/cpython-$1".*; do
        echo "$folder/bin/python$1"
    done | sort -rV
}

pins_of() { # light|full, interpreter: prints the lock file
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

# environment_lock FOLDER: opens the lock of this environment as ENVIRONMENT_LOCK. A process that builds or removes the
# environment needs the exclusive lock. A process that uses the environment shares the lock with all its children, on
# every node, until the last of them ends.
environment_lock() {
    if [ -e "$1.lock" ] && [ ! -w "$1.lock" ]; then # in the cache of another user; a shared lock needs only read access
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
            "file system, or MEGAPPO_PYTHON to the interpreter of a different environment" >&2
        return 2
    }
}

environment_for() { # arguments of a command: prints full if they or their configuration select servers, otherwise light
    local word
    for word; do
        if [[ $word =~ ^rollout\.servers.*= && ! $word =~ =null$ ]] || [[ $word =~ engine=sglang ]] ||
            { [ -f "$word" ] && grep -Eq '(^|[ {])(servers: *($|[{#])|engine: *sglang)' "$word"; }; then
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
    if nvidia-smi -L >/dev/null 2>&1; then # by default, runs on GPUs generate with SGLang
        echo full
    else
        echo light
    fi
}

gpus_here() { # prints the number of visible GPUs
    if [ -n "${CUDA_VISIBLE_DEVICES+given}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    fi
}

# Whether only this user and root can change a folder, because programs in the folder are executed. True without a folder.
environment_is_own() {
    [ -z "$(find -L "$1" -maxdepth 0 \( -perm /022 -o -not \( -user "$(id -u)" -o -user 0 \) \) 2>/dev/null)" ]
}

umask_for_own() { # prevents changes of the programs by other users, for any umask of this user
    umask "$(printf '%04o' $(($(umask) | 022)))"
}

check_environment_owner() { # folders
    local folder
    [ "${MEGAPPO_SHARED_CACHE:-no}" != yes ] || return 0
    for folder; do
        environment_is_own "$folder" || {
            echo "megappo: error: other users than you and root can write to $folder, which contains programs; chmod go-w" \
                "it, set MEGAPPO_CACHE to a folder of your own, or MEGAPPO_SHARED_CACHE=yes if you trust these users" >&2
            return 2
        }
    done
}

named_interpreter() { # prints the absolute path of the file in MEGAPPO_PYTHON
    local file
    file=$(type -P -- "$MEGAPPO_PYTHON") || file=""
    if [ ! -f "$file" ] || [ ! -x "$file" ]; then
        echo "megappo: error: MEGAPPO_PYTHON is '$MEGAPPO_PYTHON', must be an executable file; set it to the" \
            "interpreter of an environment, for example /opt/venv/bin/python, or unset it" >&2
        return 2
    fi
    echo "$(CDPATH="" cd -- "$(dirname "$file")" && pwd)/${file##*/}"
}

check_packages() { # interpreter: whether the packages of every command are installed; imports none of them
    local missing
    missing=$("$1" -c "from importlib.util import find_spec
names = 'megappo torch megatron transformers pydantic yaml rich'.split()
print('missing:', ', '.join(name for name in names if find_spec(name) is None))" 2>/dev/null) || true
    [[ $missing != "missing: "?* ]] || {
        echo "megappo: error: MEGAPPO_PYTHON is '$1', which has no ${missing#missing: }; run '$1 -m pip install .' in the" \
            "repository, or unset MEGAPPO_PYTHON" >&2
        return 2
    }
}

ensure_environment() { # full, light, or light-alone (light, even if a full environment exists)
    if [ -n "${MEGAPPO_PYTHON:-}" ]; then
        MEGAPPO_PYTHON=$(named_interpreter) || exit 2
        check_packages "$MEGAPPO_PYTHON" || exit 2
        export MEGAPPO_PYTHON # the scripts call this file instead of `python`
        PATH="$(dirname "$MEGAPPO_PYTHON"):$PATH" # for tools of the environment, such as ruff
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
    (umask_for_own && mkdir -p "$base" 2>/dev/null) && { [ -w "$base" ] || [ -e "$folder.lock" ]; } || {
        echo "megappo: error: the folder of the environments, $base, cannot be created or written; set MEGAPPO_CACHE to a" \
            "folder in which you can write" >&2
        exit 2
    }
    check_environment_owner "$base" "$folder" "$folder/bin" || exit 2
    environment_lock "$folder"
    take_environment_lock -s || exit 2
    while [ ! -e "$folder/complete" ]; do
        # The shared lock is released first. On NFS, two processes that share the lock and both need the exclusive lock
        # would wait for each other. Another process may build the environment meanwhile, so the loop checks again.
        flock -u "$ENVIRONMENT_LOCK"
        take_environment_lock -x || exit 2
        if [ ! -e "$folder/complete" ] && ! (umask_for_own && build_environment "$folder" "$python" "$kind"); then
            echo "megappo: error: the environment in $folder could not be built; see above" >&2
            exit 2
        fi
        take_environment_lock -s || exit 2
    done
    touch "$folder/complete" 2>/dev/null || true # records the last use for prune; fails in the cache of another user
    export VIRTUAL_ENV="$folder"
    PATH="$folder/bin:$PATH"
}

PIP_PIN="pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"

# Size of a built environment according to `du`, with a margin for temporary files of pip.
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
    rm -rf "$1" # remains of an interrupted build
    check_space_for "${1%/*}" "$3" || return
    echo "megappo: building the environment of $pins in $1 with $("$2" --version) from $2 (a few minutes, once)" >&2
    "$2" -m venv "$1" &&
        install_pip "$1/bin/python" &&
        install_pins "$1/bin/python" "$ROOT/$pins" &&
        touch "$1/complete"
}

install_pip() { # interpreter: installs the version of pip that installs all other packages
    "$1" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r <(echo "$PIP_PIN")
}

install_pins() { # interpreter, file: installs packages with hashes, then packages without hashes
    local install=("$1" -m pip install --quiet --disable-pip-version-check) bare='^[a-z0-9._-]+==[^ ]+$'
    "${install[@]}" --no-deps --require-hashes -r <(grep -vE "$bare" "$2") || return
    ! grep -qE "$bare" "$2" || "${install[@]}" -r <(grep -E "$bare" "$2")
}

# Whether a process of this machine has files of the folder mapped. Processes of other programs do not use the lock.
environment_is_mapped() {
    grep -qsF "$1/" /proc/[0-9]*/maps
}

prune_environments() { # days
    [[ $1 =~ ^[0-9]+$ ]] || {
        echo "megappo: error: '$1' is not a number of days; usage: launch/environment.sh prune [DAYS]" >&2
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
            rm -rf "$folder" # keeps the lock, because another process may wait for it
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
    echo "built $VIRTUAL_ENV; all nodes with access to this folder use it"
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

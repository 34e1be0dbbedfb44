# The batch scripts source this file after settings.sh. It sets the environment, the ranks and the logs of a job. Needs ROOT.

REQUEUE_CODE=85 # exit code of megappo for a requested restart
HANG_CODE=79    # exit code of a run that the watchdog ended
PORTS_FROM=10000 PORTS=20000 # below Linux's ephemeral ports

source "$ROOT/launch/slurm/requeue.sh"

fail() {
    echo "megappo: error: $*" >&2
    exit 2
}

# prepare_job WORDS...: prepare the environment for these arguments of megappo, the log folder, a record of both, and the
# address of rank 0. PLACE contains srun's options for the nodes of the trainers. By default these are all nodes of the job.
# A script may change PLACE and NODES.
prepare_job() {
    PLACE=()
    [[ $MEGAPPO_LAUNCHER =~ ^(srun|torchrun)$ ]] || fail "MEGAPPO_LAUNCHER is '$MEGAPPO_LAUNCHER', must be srun or torchrun"
    NODES=$SLURM_JOB_NUM_NODES
    [ -z "$MEGAPPO_SITE" ] || [ -n "$MEGAPPO_CONTAINER" ] || { [ -f "$MEGAPPO_SITE" ] && [ -r "$MEGAPPO_SITE" ]; } || fail "MEGAPPO_SITE is '$MEGAPPO_SITE', must be a readable file; name one, or unset it"
    choose_ranks_per_node
    LOGS=$(realpath -m "$MEGAPPO_LOGS")/$SLURM_JOB_ID/attempt-${SLURM_RESTART_COUNT:-0}
    mkdir -p "$LOGS"
    enter_environment "$@"
    container_command
    MASTER_ADDR=$(address_of "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)")
    export MASTER_ADDR OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(end_of_job)}
    (umask 077 && record_environment >"$LOGS/job.txt")
}

# RANKS_PER_NODE: the setting, otherwise sbatch's --ntasks-per-node, otherwise one rank per GPU. With torchrun, sbatch
# starts one task per node for any number of GPUs.
choose_ranks_per_node() {
    local tasks=${SLURM_NTASKS_PER_NODE:-${SLURM_NTASKS_PER_NODE_HET_GROUP_0:-}} gpus=${SLURM_GPUS_ON_NODE:-}
    if [ "$MEGAPPO_LAUNCHER" = torchrun ] && [ "$tasks" = 1 ]; then
        tasks=""
    fi
    RANKS_PER_NODE=${MEGAPPO_RANKS_PER_NODE:-${tasks:-${gpus:-1}}}
    [[ $RANKS_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "MEGAPPO_RANKS_PER_NODE is '$RANKS_PER_NODE', must be a whole number"
    if [[ $gpus =~ ^[0-9]+$ ]] && [ "$gpus" -gt "$RANKS_PER_NODE" ]; then
        echo "megappo: warning: a node has $gpus GPUs and $RANKS_PER_NODE ranks, so no rank uses $((gpus - RANKS_PER_NODE))" \
            "of the GPUs; unless servers use them, submit with --ntasks-per-node $gpus, or set MEGAPPO_RANKS_PER_NODE=$gpus" >&2
    fi
}

enter_environment() {
    source "$ROOT/launch/environment.sh" # import path; installs nothing yet
    if [ -n "$MEGAPPO_CONTAINER$MEGAPPO_VENV$MEGAPPO_CONDA$MEGAPPO_MODULES" ]; then
        unset MEGAPPO_PYTHON # their interpreter is used instead
    fi
    if [ -n "$MEGAPPO_CONTAINER" ]; then
        return
    fi
    set +u # scripts of modules, venvs and conda read variables that may not be set
    if [ -n "$MEGAPPO_MODULES" ]; then
        command -v module >/dev/null || fail "MEGAPPO_MODULES is set, but there is no command 'module' on $(hostname)"
        local names
        read -ra names <<<"$MEGAPPO_MODULES"
        module load "${names[@]}" || fail "module load $MEGAPPO_MODULES failed; fix MEGAPPO_MODULES"
    fi
    if [ -n "$MEGAPPO_VENV" ]; then
        [ -f "$MEGAPPO_VENV/bin/activate" ] || fail "MEGAPPO_VENV '$MEGAPPO_VENV' has no bin/activate; name its folder"
        source "$MEGAPPO_VENV/bin/activate"
    elif [ -n "$MEGAPPO_CONDA" ]; then
        command -v conda >/dev/null || fail "MEGAPPO_CONDA is set, but there is no command 'conda' on $(hostname)"
        eval "$(conda shell.bash hook)"
        conda activate "$MEGAPPO_CONDA" || fail "conda has no environment '$MEGAPPO_CONDA'; fix MEGAPPO_CONDA"
    elif [ -z "$MEGAPPO_MODULES" ]; then
        ensure_environment "$(environment_for "$@")"
    fi
    set -u
}

# Prints the name of the job for SLURM's commands. The job id of the last task of an array would select all its tasks.
job_name() {
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

# Sets SRUN_CONTAINER to options of srun, and IN_CONTAINER to a prefix of commands.
container_command() {
    SRUN_CONTAINER=() IN_CONTAINER=()
    if [ -z "$MEGAPPO_CONTAINER" ]; then
        return
    fi
    local mounts="$ROOT:$ROOT,$LOGS:$LOGS${MEGAPPO_CONTAINER_MOUNTS:+,$MEGAPPO_CONTAINER_MOUNTS}"
    [ "$PWD" = "$ROOT" ] || mounts="$PWD:$PWD,$mounts"
    case $MEGAPPO_CONTAINER_RUNTIME in
        pyxis)
            SRUN_CONTAINER=("--container-image=$MEGAPPO_CONTAINER" "--container-mounts=$mounts" "--container-workdir=$PWD")
            ;;
        apptainer)
            IN_CONTAINER=(apptainer exec --bind "$mounts" --pwd "$PWD")
            [ -z "${SLURM_GPUS_ON_NODE:-}" ] || IN_CONTAINER+=(--nv)
            IN_CONTAINER+=("$MEGAPPO_CONTAINER")
            ;;
        *) fail "MEGAPPO_CONTAINER_RUNTIME is '$MEGAPPO_CONTAINER_RUNTIME', must be pyxis or apptainer" ;;
    esac
}

# Prints the end of this job in seconds since 1970, for versions of SLURM that do not set the variable (22.05 in Debian).
# Prints nothing for a job without an end.
end_of_job() {
    SLURM_TIME_FORMAT=%s scontrol --oneliner show job "$(job_name)" | sed -n '1s/.* EndTime=\([0-9]*\) .*/\1/p'
}

# Prints the name of a node, or SLURM's address of the node if the name cannot be resolved.
address_of() {
    if getent hosts "$1" >/dev/null; then
        echo "$1"
    else
        scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
    fi
}

# free_port ADDRESS [TAKEN...]: print a port without a listener at the address, except the TAKEN ports.
free_port() {
    local address=$1 port
    shift
    while true; do
        port=$((PORTS_FROM + (RANDOM * 32768 + RANDOM) % PORTS))
        if [[ " $* " != *" $port "* ]] && ! timeout 3 bash -c "exec 3<>/dev/tcp/$address/$port" 2>/dev/null; then
            echo "$port"
            return
        fi
    done
}

# Variables that job.txt records: variables with an effect on the run, without names that may belong to secrets.
RECORDED='^((SLURM|MEGAPPO|CUDA|NVIDIA|NCCL|GLOO|UCX|FI|OMP|MKL|OPENBLAS|ONEDNN|DNNL|TORCH|TORCHINDUCTOR|PYTORCH|ATEN|TRITON'
RECORDED+='|SGLANG|NVTE|CONDA|APPTAINER|SINGULARITY|LMOD)_[A-Z0-9_]*|(PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV'
RECORDED+='|LOADEDMODULES|HOME|USER|HOSTNAME|LANG|TZ|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|WANDB_MODE'
RECORDED+='|MASTER_ADDR|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY))$'
SECRET='(TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|JWT|_PAT$|KEY)'

# Prints the job, the version of the code and the variables, without secrets.
record_environment() {
    local variable name value
    echo "date: $(date --iso-8601=seconds)"
    echo "commit: $(git -C "$ROOT" describe --always --dirty 2>/dev/null || echo unknown)"
    echo "python: $([ -n "$MEGAPPO_CONTAINER" ] && echo "in $MEGAPPO_CONTAINER" || command -v "${MEGAPPO_PYTHON:-python}")"
    scontrol --oneliner show job "$(job_name)" | mask_credentials
    while IFS= read -r -d '' variable; do
        name=${variable%%=*} value=${variable#*=}
        if [[ $name =~ $RECORDED ]] && ! [[ $name =~ $SECRET ]]; then
            [[ ${name,,} != http*_proxy ]] || value=${value/#*@/***@} # NAME:PASSWORD@HOST:PORT is a proxy too
            echo "$name=${value//$'\n'/\\n}" | mask_credentials
        fi
    done < <(env -0 | sort -z)
}

# Masks the text between :// and @ in addresses.
mask_credentials() {
    sed -E 's#([A-Za-z][A-Za-z0-9+.-]*://)[^[:space:]"'\'',]*@#\1***@#g'
}

# run_ranks STEP WORDS...: run megappo with these arguments on every rank. Logs and exit codes are in LOGS/STEP. Returns 85
# if a rank requested a requeue.
run_ranks() {
    local step=$1 code=0 follower per_node=$RANKS_PER_NODE
    shift
    export MEGAPPO_RANK_LOGS=$LOGS/$step MEGAPPO_SITE
    mkdir -p "$MEGAPPO_RANK_LOGS"
    MASTER_PORT=$(free_port "$MASTER_ADDR")
    export MASTER_PORT
    local start=(bash "$ROOT/launch/slurm/rank.sh" "$@")
    if [ "$MEGAPPO_LAUNCHER" = torchrun ]; then
        per_node=1
        start=(bash "$ROOT/launch/slurm/node.sh" "$NODES" "$RANKS_PER_NODE" "$@")
    fi
    local options=("${PLACE[@]}" --job-name "$step" --nodes "$NODES" --ntasks $((NODES * per_node)) --ntasks-per-node "$per_node" --kill-on-bad-exit=1)
    if [ -n "${SLURM_CPUS_ON_NODE:-}" ] && [ "$SLURM_CPUS_ON_NODE" -ge "$per_node" ]; then
        options+=(--cpus-per-task $((SLURM_CPUS_ON_NODE / per_node)))
    fi
    if [ -n "${MEGAPPO_STEP_MINUTES:-}" ]; then
        options+=(--time "$MEGAPPO_STEP_MINUTES") # time limit of the step
    fi
    if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        options+=(--gpu-bind=none) # NCCL needs access to the other GPUs of the node
    fi
    : >"$MEGAPPO_RANK_LOGS/rank-0.log"
    tail -n +1 -F "$MEGAPPO_RANK_LOGS/rank-0.log" 2>/dev/null &
    follower=$!
    srun "${options[@]}" "${SRUN_CONTAINER[@]}" "${IN_CONTAINER[@]}" "${start[@]}" || code=$?
    sleep 2 # time for the follower to print the last lines of rank 0
    kill "$follower" 2>/dev/null || true # a signal to the whole job also ends the follower
    wait "$follower" 2>/dev/null || true
    if grep -qsx -e "$REQUEUE_CODE" -e "$HANG_CODE" "$MEGAPPO_RANK_LOGS"/exit-*; then
        return "$REQUEUE_CODE"
    fi
    # The exit codes of the ranks decide, because torchrun's agents may lose their connections after a normal end.
    if [ "$(cat "$MEGAPPO_RANK_LOGS"/exit-* 2>/dev/null | grep -cx 0)" = $((NODES * RANKS_PER_NODE)) ]; then
        return 0
    fi
    show_cause
    [ "$code" != 0 ] || code=1 # srun reports no failure, but a rank did not write its exit code
    return "$code"
}

# Prints the log of the rank that failed first, if the log of rank 0 does not contain the reason. Sets FIRST_RANK and
# FIRST_CODE to the number and the exit code of this rank.
show_cause() {
    local file code first='' said=''
    FIRST_RANK='' FIRST_CODE=''
    while IFS= read -r file; do
        code=$(<"$file")
        if [[ $code != 0 && $code != "$REQUEUE_CODE" ]]; then
            first=${file##*/exit-} FIRST_RANK=${file##*/exit-} FIRST_CODE=$code
            break
        fi
    done < <(ls -tr "$MEGAPPO_RANK_LOGS"/exit-* 2>/dev/null)
    if [[ -n $first && $code -gt 128 && $code -lt 193 ]]; then
        echo "megappo: error: rank $first ended first, by SIG$(kill -l $((code - 128))); see $MEGAPPO_RANK_LOGS/rank-$first.log"
    fi
    if ! grep -qs 'megappo: error' "$MEGAPPO_RANK_LOGS/rank-0.log"; then
        said=$(grep -ls 'megappo: error' "$MEGAPPO_RANK_LOGS"/rank-*.log | sort -V | head -n 1)
        [ -n "$said" ] || [ -z "$first" ] || said=$MEGAPPO_RANK_LOGS/rank-$first.log
        [ -z "$said" ] || [ "${said##*/}" = rank-0.log ] || tail -n 60 "$said"
    fi
}

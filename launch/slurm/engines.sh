# ppo_disaggregated.sbatch sources this file after job.sh. SGLang runs on separate nodes, as a concurrent step of the job.

# Select the nodes of trainers and engines: two components of a heterogeneous job, or the first and last nodes of the job.
split_nodes() {
    ENGINE_NODELIST=${SLURM_JOB_NODELIST_HET_GROUP_1:-}
    if [ -n "$ENGINE_NODELIST" ]; then
        [ "$SLURM_HET_SIZE" = 2 ] || fail "the job has $SLURM_HET_SIZE components, must have two: trainers : engines"
        ENGINE_NODES=$SLURM_JOB_NUM_NODES_HET_GROUP_1
        PLACE=(--het-group=0) ENGINE_PLACE=(--het-group=1)
    else
        ENGINE_NODES=$MEGAPPO_ENGINE_NODES
        if ! [[ $ENGINE_NODES =~ ^[1-9][0-9]*$ ]] || [ "$ENGINE_NODES" -ge "$NODES" ]; then
            fail "MEGAPPO_ENGINE_NODES is '$ENGINE_NODES', must be a whole number from 1 to $((NODES - 1)) of the job's" \
                "$NODES nodes; or submit a heterogeneous job: sbatch TRAINERS : ENGINES"
        fi
        NODES=$((NODES - ENGINE_NODES))
        PLACE=(--relative 0) ENGINE_PLACE=(--relative "$NODES")
        ENGINE_NODELIST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n "$ENGINE_NODES" | paste -sd,)
    fi
}

# Prints the address of a name on this node. On the node itself, the name of the node is often a loopback address.
number_of() {
    local found
    found=$(getent ahosts "$1" | awk 'NR == 1 {print $1}')
    echo "${found:-$1}"
}

# place_engines WORDS...: determine the number of engines, their addresses (URLS), and the key of the job.
place_engines() {
    local described node address port width ranks gpus number=0 taken=''
    described=$(srun "${ENGINE_PLACE[@]}" --nodes 1 --ntasks 1 "${SRUN_CONTAINER[@]}" "${IN_CONTAINER[@]}" \
        bash "$ROOT/launch/slurm/engine.sh" describe "$@") || fail "the engines' settings cannot be read"
    read -r width ranks gpus ENGINE_CPUS <<<"$described"
    ENGINES_PER_NODE=${MEGAPPO_ENGINES_PER_NODE:-$((gpus > 0 ? gpus / ranks : 1))}
    [[ $ENGINES_PER_NODE =~ ^[0-9]+$ ]] || fail "MEGAPPO_ENGINES_PER_NODE is '$ENGINES_PER_NODE', must be a whole number"
    if [ "$ENGINES_PER_NODE" = 0 ] || { [ "$gpus" != 0 ] && [ $((ENGINES_PER_NODE * ranks)) -gt "$gpus" ]; }; then
        fail "$ENGINES_PER_NODE engines of rollout.servers.tensor_parallel $((width * ranks)) do not fit on $width nodes of" \
            "$gpus GPUs; decrease tensor_parallel, or set rollout.servers.nodes"
    fi
    if [ $((ENGINE_NODES % width)) != 0 ]; then
        fail "$ENGINE_NODES engine nodes are not a multiple of rollout.servers.nodes $width; change one of them"
    fi
    URLS=() MEGAPPO_ENGINE_PORTS='' MEGAPPO_ENGINE_MEETINGS='' MEGAPPO_ENGINE_ADDRESSES=''
    for node in $(scontrol show hostnames "$ENGINE_NODELIST"); do
        address=$(address_of "$node")
        MEGAPPO_ENGINE_ADDRESSES+="$(number_of "$address") "
        number=$((number + 1))
        if [ $(((number - 1) % width)) != 0 ]; then
            continue # the previous node has the first parts of the engines
        fi
        for _ in $(seq "$ENGINES_PER_NODE"); do
            # Each port is used only once in the job, because nodes may share an address.
            port=$(free_port "$address" $taken) && taken+=" $port"
            URLS+=("http://$address:$port") MEGAPPO_ENGINE_PORTS+="$port "
            port=$(free_port "$address" $taken) && taken+=" $port"
            MEGAPPO_ENGINE_MEETINGS+="$address:$port "
        done
    done
    # The key is passed in the environment, because all users can read command lines.
    MEGAPPO_SGLANG_API_KEY=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
    export MEGAPPO_SGLANG_API_KEY MEGAPPO_ENGINE_PORTS MEGAPPO_ENGINE_HOST MEGAPPO_ENGINE_LINGER
    export MEGAPPO_ENGINE_RANKS=$ranks MEGAPPO_ENGINES_OF_NODE=$ENGINES_PER_NODE MEGAPPO_ENGINE_WIDTH=$width
    export MEGAPPO_ENGINE_MEETINGS MEGAPPO_ENGINE_ADDRESSES
    ENGINE_WORDS=(rollout.servers.placement=disaggregated rollout.servers.count=null "rollout.servers.urls=[]")
    TRAINER_WORDS=("${ENGINE_WORDS[@]:0:2}" rollout.servers.nodes=1)
    TRAINER_WORDS+=("rollout.servers.urls=[$(printf "'%s'," "${URLS[@]}")]")
}

# start_engines WORDS...: start the step of the engines in the background. If this step ends, the trainers receive a stop
# signal. TRAINERS is the name of their step.
start_engines() {
    ENGINE_LOGS=$LOGS/engines
    mkdir -p "$ENGINE_LOGS"
    run_engines "$@" "${ENGINE_WORDS[@]}" &
    ENGINES=$!
}

run_engines() {
    trap : TERM # a cancelled job also signals this shell, which ends together with the engines
    local code=0 options=(--job-name engines --nodes "$ENGINE_NODES" --ntasks $((ENGINE_NODES * ENGINES_PER_NODE)))
    options+=(--ntasks-per-node "$ENGINES_PER_NODE" --distribution=block --kill-on-bad-exit=1)
    if [ "$ENGINE_CPUS" -ge "$ENGINES_PER_NODE" ]; then
        options+=(--cpus-per-task $((ENGINE_CPUS / ENGINES_PER_NODE)))
    fi
    if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        options+=(--gpu-bind=none) # each engine gets the numbers of its GPUs as an option
    fi
    MEGAPPO_RANK_LOGS=$ENGINE_LOGS srun "${ENGINE_PLACE[@]}" "${options[@]}" "${SRUN_CONTAINER[@]}" \
        "${IN_CONTAINER[@]}" bash "$ROOT/launch/slurm/engine.sh" serve "$@" || code=$?
    if [ ! -e "$ENGINE_LOGS/stopping" ]; then
        echo "megappo: the step of the engines ended (exit code $code), so the trainers are stopped; see $ENGINE_LOGS" >&2
        tail -qn 3 "$ENGINE_LOGS"/engine-*.log >&2
        signal_step "${TRAINERS:-train}" TERM
        for _ in $(seq 60); do
            [ ! -e "$ENGINE_LOGS/stopping" ] || return 0
            sleep 1
        done
        signal_step "${TRAINERS:-train}" KILL
    fi
}

end_engines() {
    touch "$ENGINE_LOGS/stopping"
    signal_step engines INT
    for _ in $(seq 300); do
        kill -0 "$ENGINES" 2>/dev/null || break
        sleep 0.1
    done
    signal_step engines KILL
    kill -KILL "$ENGINES" 2>/dev/null || true
    wait "$ENGINES" 2>/dev/null || true
}

# signal_step NAME SIGNAL: send a signal to all steps with this name.
signal_step() {
    local step
    for step in $(squeue --noheader --steps --job "$(job_name)${SLURM_JOB_ID_HET_GROUP_1:+,$SLURM_JOB_ID_HET_GROUP_1}" \
        --format '%i %j' | awk -v name="$1" '$2 == name {print $1}'); do
        scancel --signal="$2" "$step" 2>/dev/null || true
    done
}

# job.sh sources this file. The functions put a job back into the queue.

FAULT_CODE=71                                # exit code of ranks after a failure of a device or of NCCL
CRASH_SIGNALS=' ABRT BUS FPE ILL KILL SEGV ' # signals of a crash

# put_back CODE: put the job back into the queue if CODE requests it, or if a rank crashed.
put_back() {
    if [ "$1" = "$REQUEUE_CODE" ]; then
        requeue
    elif [ "$1" != 0 ]; then
        requeue_after_crash
    fi
}

# requeue [NODES]: put the job back into the queue. If the job was cancelled, or if SLURM requeues the job (preemption), this
# function does nothing. The job does not get the NODES again.
requeue() {
    local state excluded=${1:-}
    # A heterogeneous job has a line for each component. The state of the first component counts.
    state=$(scontrol --oneliner show job "$(job_name)" | sed -n '1s/.* JobState=\([A-Z_]*\).*/\1/p')
    if [ "$state" != RUNNING ]; then
        echo "megappo: the job is $state, so it is not put back into the queue here"
    elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MEGAPPO_MOST_REQUEUES" ]; then
        echo "megappo: put back ${SLURM_RESTART_COUNT} times already (MEGAPPO_MOST_REQUEUES); sbatch it again to continue"
    else
        echo "megappo: back into the queue"
        if [ -z "$excluded" ]; then
            trap - TERM # SLURM ends this script with SIGTERM
            scontrol requeue "$(job_name)"
        else
            trap '' TERM # this script must survive the requeue, because SLURM excludes nodes only from jobs in the queue
            scontrol requeue "$(job_name)"
            scontrol update JobId="$(job_name)" ExcNodeList="$excluded" ||
                echo "megappo: warning: SLURM does not exclude $excluded; the job may run there again"
            trap - TERM
            kill -TERM $$
        fi
        sleep 300 # SLURM ends this script; the job could count as failed if the script exited first
    fi
}

# Put the job back into the queue after a crash, if the run has written a checkpoint since its last start. The number of
# requeues is limited. Errors of settings or code have different exit codes and end the job.
requeue_after_crash() {
    local what node='' step crashes excluded=''
    what=$(crash) || return 0
    node=$(crashed_node)
    what+=${node:+ on node $node}
    crashes=$(cat "${LOGS%/*}/crashes" 2>/dev/null | wc -l || true)
    step=$(newest_checkpoint "$LOGS")
    if [ "$MEGAPPO_CRASH_REQUEUES" = 0 ]; then
        note_crash "$what; the job ends, because MEGAPPO_CRASH_REQUEUES is 0"
    elif [ "$step" -le "$(checkpoint_before)" ]; then
        note_crash "$what; the job ends, because the run has written no checkpoint since its last start"
    elif [ "$crashes" -ge "$MEGAPPO_CRASH_REQUEUES" ]; then
        note_crash "$what; the job ends, because MEGAPPO_CRASH_REQUEUES allows $crashes requeues"
    else
        note_crash "$what; the run has advanced to the checkpoint of step $step, so the job goes back into the queue" \
            "(requeue $((crashes + 1)) of at most $MEGAPPO_CRASH_REQUEUES after crashes, MEGAPPO_CRASH_REQUEUES)"
        echo "$what" >>"${LOGS%/*}/crashes"
        [ -z "$node" ] || choose_excluded "$node"
        requeue "$excluded"
    fi
}

# Prints a sentence about the crash. Fails if no rank crashed.
crash() {
    [ -n "$FIRST_CODE" ] || return 1
    if [ "$FIRST_CODE" = "$FAULT_CODE" ]; then
        if [ -f "$MEGAPPO_RANK_LOGS/first-failed" ]; then
            echo "a device or NCCL failed on rank $(cat "$MEGAPPO_RANK_LOGS/first-failed")"
        else
            echo "ranks lost their connections, and the first rank to fail is unknown"
        fi
    elif [ "$FIRST_CODE" -gt 128 ] && [[ $CRASH_SIGNALS = *" $(kill -l $((FIRST_CODE - 128)) 2>/dev/null) "* ]]; then
        echo "rank $FIRST_RANK was ended first, by SIG$(kill -l $((FIRST_CODE - 128))),"
    else
        return 1
    fi
}

# Prints the node of the rank that failed first, or nothing if the node is unknown.
crashed_node() {
    local rank=$FIRST_RANK
    if [ "$FIRST_CODE" = "$FAULT_CODE" ]; then
        rank=$(cat "$MEGAPPO_RANK_LOGS/first-failed" 2>/dev/null)
    fi
    cat "$MEGAPPO_RANK_LOGS/node-$rank" 2>/dev/null || true
}

# Prints a message to the output of the job and to the log of rank 0.
note_crash() {
    echo "megappo: $*" | tee -a "$MEGAPPO_RANK_LOGS/rank-0.log"
}

# newest_checkpoint FOLDER: prints the step of the newest checkpoint of an attempt, or 0.
newest_checkpoint() {
    cat "$1/train/checkpoint" 2>/dev/null || echo 0
}

# Prints the step of the newest checkpoint of all earlier attempts, or 0.
checkpoint_before() {
    local attempt newest=0 step
    for attempt in $(seq 0 $((${SLURM_RESTART_COUNT:-0} - 1))); do
        step=$(newest_checkpoint "${LOGS%/*}/attempt-$attempt")
        [ "$step" -le "$newest" ] || newest=$step
    done
    echo "$newest"
}

# choose_excluded NODE: set `excluded` to the excluded nodes of the job and NODE, if enough other nodes remain.
choose_excluded() {
    local node=$1 before required others
    if [ "$MEGAPPO_EXCLUDE_NODES" != yes ]; then
        note_crash "node $node is not excluded, because MEGAPPO_EXCLUDE_NODES is $MEGAPPO_EXCLUDE_NODES"
        return
    fi
    if [ -n "${SLURM_HET_SIZE:-}" ]; then
        note_crash "node $node is not excluded, because the job is heterogeneous"
        return
    fi
    before=$(job_nodes ExcNodeList) required=$(job_nodes ReqNodeList)
    others=$(sinfo --noheader --Node --partition "$SLURM_JOB_PARTITION" --states idle,alloc,mix,comp --format %N | sort -u |
        grep -vxF -e "$node" ${before:+$(printf -- '-e %s ' $before)} | wc -l || true)
    if [ "$others" -lt "$SLURM_JOB_NUM_NODES" ] || grep -qxF "$node" <<<"$required"; then
        note_crash "node $node is not excluded, because the job needs $SLURM_JOB_NUM_NODES nodes and cannot use $others others"
        return
    fi
    excluded=$(printf '%s\n' $before "$node" | paste -sd,)
    note_crash "node $node is excluded from now on (MEGAPPO_EXCLUDE_NODES)"
}

# job_nodes FIELD: prints the nodes in a field of the job, one per line.
job_nodes() {
    local list
    list=$(scontrol --oneliner show job "$(job_name)" | sed -n "1s/.* $1=\([^ ]*\).*/\1/p")
    [ -z "$list" ] || [ "$list" = '(null)' ] || scontrol show hostnames "$list"
}

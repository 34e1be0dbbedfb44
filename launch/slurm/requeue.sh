# Sourced by job.sh: how a job goes back into the queue.

FAULT_CODE=71                                # exit code of ranks where a device or NCCL failed
CRASH_SIGNALS=' ABRT BUS FPE ILL KILL SEGV ' # a rank that such a signal ended has crashed

# put_back CODE: put the job back into the queue where its ranks asked for it, or have crashed.
put_back() {
    if [ "$1" = "$REQUEUE_CODE" ]; then
        requeue
    elif [ "$1" != 0 ]; then
        requeue_after_crash
    fi
}

# Put the job back into the queue, unless it was cancelled or SLURM does so itself (preemption). With a list of nodes, the
# job gets none of these.
requeue() {
    local state excluded=${1:-}
    # A heterogeneous job has a line for every component; the first one's state counts.
    state=$(scontrol --oneliner show job "$(job_name)" | sed -n '1s/.* JobState=\([A-Z_]*\).*/\1/p')
    if [ "$state" != RUNNING ]; then
        echo "megappo: the job is $state, so it is not put back into the queue here"
    elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MEGAPPO_MOST_REQUEUES" ]; then
        echo "megappo: put back ${SLURM_RESTART_COUNT} times already (MEGAPPO_MOST_REQUEUES); sbatch it again to go on"
    else
        echo "megappo: back into the queue"
        if [ -z "$excluded" ]; then
            trap - TERM # with this signal SLURM ends this script
            scontrol requeue "$(job_name)"
        else
            trap '' TERM # SLURM changes the nodes of jobs in the queue only, so this script must outlive the requeue
            scontrol requeue "$(job_name)"
            scontrol update JobId="$(job_name)" ExcNodeList="$excluded" ||
                echo "megappo: warning: SLURM does not exclude $excluded; the job may run there again"
            trap - TERM
            kill -TERM $$
        fi
        sleep 300 # SLURM ends this script now; were it to end by itself, the job could count as failed
    fi
}

# Put the job back after a crash of a rank, a bounded number of times, if the run has advanced since its last start. An
# error of settings or of code ends the rank with another exit code, and the job then ends.
requeue_after_crash() {
    local what node='' step crashes excluded=''
    what=$(crash) || return 0
    node=$(crashed_node)
    what+=${node:+ on node $node}
    crashes=$(cat "${LOGS%/*}/crashes" 2>/dev/null | wc -l || true)
    step=$(newest_checkpoint "$LOGS")
    if [ "$MEGAPPO_CRASH_REQUEUES" = 0 ]; then
        note_crash "$what; the job ends, as MEGAPPO_CRASH_REQUEUES is 0"
    elif [ "$step" -le "$(checkpoint_before)" ]; then
        note_crash "$what; the job ends, as the run has written no checkpoint since its last start"
    elif [ "$crashes" -ge "$MEGAPPO_CRASH_REQUEUES" ]; then
        note_crash "$what; the job ends, as it was put back after $crashes crashes already (MEGAPPO_CRASH_REQUEUES)"
    else
        note_crash "$what; the run has advanced to the checkpoint of step $step, so the job goes back into the queue" \
            "(crash $((crashes + 1)), at most $MEGAPPO_CRASH_REQUEUES by MEGAPPO_CRASH_REQUEUES)"
        echo "$what" >>"${LOGS%/*}/crashes"
        [ -z "$node" ] || choose_excluded "$node"
        requeue "$excluded"
    fi
}

# A sentence about the crash; fails where the ranks did not crash.
crash() {
    [ -n "$FIRST_CODE" ] || return 1
    if [ "$FIRST_CODE" = "$FAULT_CODE" ]; then
        if [ -f "$MEGAPPO_RANK_LOGS/first-failed" ]; then
            echo "a device or NCCL failed on rank $(cat "$MEGAPPO_RANK_LOGS/first-failed")"
        else
            echo "ranks lost their connections, and no rank is known to have failed first"
        fi
    elif [ "$FIRST_CODE" -gt 128 ] && [[ $CRASH_SIGNALS = *" $(kill -l $((FIRST_CODE - 128)) 2>/dev/null) "* ]]; then
        echo "rank $FIRST_RANK was ended first, by SIG$(kill -l $((FIRST_CODE - 128))),"
    else
        return 1
    fi
}

# The node of the rank that failed first; nothing where it is not known.
crashed_node() {
    local rank=$FIRST_RANK
    if [ "$FIRST_CODE" = "$FAULT_CODE" ]; then
        rank=$(cat "$MEGAPPO_RANK_LOGS/first-failed" 2>/dev/null)
    fi
    cat "$MEGAPPO_RANK_LOGS/node-$rank" 2>/dev/null || true
}

# In the job's output and in the log of rank 0.
note_crash() {
    echo "megappo: $*" | tee -a "$MEGAPPO_RANK_LOGS/rank-0.log"
}

# newest_checkpoint FOLDER: the step of the newest checkpoint that an attempt has written; 0 without one.
newest_checkpoint() {
    cat "$1/train/checkpoint" 2>/dev/null || echo 0
}

# The same of the attempts before this one.
checkpoint_before() {
    local attempt newest=0 step
    for attempt in $(seq 0 $((${SLURM_RESTART_COUNT:-0} - 1))); do
        step=$(newest_checkpoint "${LOGS%/*}/attempt-$attempt")
        [ "$step" -le "$newest" ] || newest=$step
    done
    echo "$newest"
}

# choose_excluded NODE: sets `excluded` to the nodes that the job must not get, where enough others remain for it.
choose_excluded() {
    local node=$1 before required others
    if [ "$MEGAPPO_EXCLUDE_NODES" != yes ]; then
        note_crash "node $node is not excluded, as MEGAPPO_EXCLUDE_NODES is $MEGAPPO_EXCLUDE_NODES"
        return
    fi
    if [ -n "${SLURM_HET_SIZE:-}" ]; then
        note_crash "node $node is not excluded, as the job is heterogeneous"
        return
    fi
    before=$(job_nodes ExcNodeList) required=$(job_nodes ReqNodeList)
    others=$(sinfo --noheader --Node --partition "$SLURM_JOB_PARTITION" --states idle,alloc,mix,comp --format %N | sort -u |
        grep -vxF -e "$node" ${before:+$(printf -- '-e %s ' $before)} | wc -l || true)
    if [ "$others" -lt "$SLURM_JOB_NUM_NODES" ] || grep -qxF "$node" <<<"$required"; then
        note_crash "node $node is not excluded, as too few other nodes remain for the $SLURM_JOB_NUM_NODES of the job"
        return
    fi
    excluded=$(printf '%s\n' $before "$node" | paste -sd,)
    note_crash "node $node is excluded from now on (MEGAPPO_EXCLUDE_NODES)"
}

# job_nodes FIELD: the nodes in a field of the job, one a line.
job_nodes() {
    local list
    list=$(scontrol --oneliner show job "$(job_name)" | sed -n "1s/.* $1=\([^ ]*\).*/\1/p")
    [ -z "$list" ] || [ "$list" = '(null)' ] || scontrol show hostnames "$list"
}

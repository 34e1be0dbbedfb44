# All that differs between clusters. Change the values here, or export a variable of the same name before sbatch.
# Empty means: not used. Without modules, venv, conda or container the environment of launch/environment.sh is taken.

# Modules to load, separated by spaces.
MEGAPPO_MODULES=${MEGAPPO_MODULES:-}
# Folder of a virtual environment.
MEGAPPO_VENV=${MEGAPPO_VENV:-}
# Name or folder of a conda environment.
MEGAPPO_CONDA=${MEGAPPO_CONDA:-}
# Image in which all ranks run, and what runs it: pyxis or apptainer.
MEGAPPO_CONTAINER=${MEGAPPO_CONTAINER:-}
MEGAPPO_CONTAINER_RUNTIME=${MEGAPPO_CONTAINER_RUNTIME:-pyxis}
# Additional folders of the image (the repository and the logs are always mounted): FROM:TO,FROM:TO.
MEGAPPO_CONTAINER_MOUNTS=${MEGAPPO_CONTAINER_MOUNTS:-}
# File with exports of the site (NCCL_SOCKET_IFNAME, HF_HOME, ...); every rank sources it. It may read variables that are
# not set.
MEGAPPO_SITE=${MEGAPPO_SITE:-}
# srun: one task per rank. torchrun: one task per node, which starts its ranks. The ranks must end within 30 seconds after SIGTERM.
MEGAPPO_LAUNCHER=${MEGAPPO_LAUNCHER:-srun}
# Default: sbatch's --ntasks-per-node, otherwise one rank per GPU of a node, otherwise 1. With torchrun and one task per
# node, the default is the number of GPUs.
MEGAPPO_RANKS_PER_NODE=${MEGAPPO_RANKS_PER_NODE:-}
# Folder of the logs, from the repository; a job gets a folder of its own in it.
MEGAPPO_LOGS=${MEGAPPO_LOGS:-logs}
# yes: `megappo doctor` runs on all ranks first, and the job ends where it finds something broken.
MEGAPPO_DOCTOR=${MEGAPPO_DOCTOR:-yes}
# Most times that a job that asks for it (exit code 85) is put back into the queue.
MEGAPPO_MOST_REQUEUES=${MEGAPPO_MOST_REQUEUES:-100}
# Most times that a job is put back into the queue after a crash: a rank is killed by a signal, or a device or NCCL fails.
# The run must have written a checkpoint since its last start. 0 disables these requeues.
MEGAPPO_CRASH_REQUEUES=${MEGAPPO_CRASH_REQUEUES:-3}
# yes: the job excludes the node of the rank that failed first, if enough other nodes remain. no: the job may use the node.
MEGAPPO_EXCLUDE_NODES=${MEGAPPO_EXCLUDE_NODES:-yes}

# For ppo_disaggregated.sbatch only. Nodes of the job, its last ones, that generate; the others train. A heterogeneous
# job needs it not: its first component trains, its second generates.
MEGAPPO_ENGINE_NODES=${MEGAPPO_ENGINE_NODES:-}
# Default: as many as fit, by the node's GPUs and rollout.sglang.tensor_parallel; one without GPUs.
MEGAPPO_ENGINES_PER_NODE=${MEGAPPO_ENGINES_PER_NODE:-}
# Interface that engines listen on; every request needs the key that the job makes. Default: the one that bears the
# address of the engine's node.
MEGAPPO_ENGINE_HOST=${MEGAPPO_ENGINE_HOST:-}
# Seconds for which engines still answer trainers when the job is cancelled or preempted; less than SLURM's KillWait.
MEGAPPO_ENGINE_LINGER=${MEGAPPO_ENGINE_LINGER:-20}

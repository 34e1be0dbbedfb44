# Settings of the cluster. Change the values in this file, or export variables with the same names before sbatch.
# Empty settings are not used. Without modules, venv, conda or container, the jobs use the environment of
# launch/environment.sh.

# Modules to load, separated by spaces.
MEGAPPO_MODULES=${MEGAPPO_MODULES:-}
# Folder of a virtual environment.
MEGAPPO_VENV=${MEGAPPO_VENV:-}
# Name or folder of a conda environment.
MEGAPPO_CONDA=${MEGAPPO_CONDA:-}
# Image in which all ranks run, and its runtime: pyxis or apptainer.
MEGAPPO_CONTAINER=${MEGAPPO_CONTAINER:-}
MEGAPPO_CONTAINER_RUNTIME=${MEGAPPO_CONTAINER_RUNTIME:-pyxis}
# Additional folders of the image (the repository, the folder of the job and the logs are always mounted): FROM:TO,FROM:TO.
MEGAPPO_CONTAINER_MOUNTS=${MEGAPPO_CONTAINER_MOUNTS:-}
# File with exports of the site (NCCL_SOCKET_IFNAME, HF_HOME, ...). Every rank sources the file, which may read unset
# variables.
MEGAPPO_SITE=${MEGAPPO_SITE:-}
# srun: one task per rank. torchrun: one task per node, which starts its ranks. The ranks must end within 30 seconds after SIGTERM.
MEGAPPO_LAUNCHER=${MEGAPPO_LAUNCHER:-srun}
# Default: sbatch's --ntasks-per-node, otherwise one rank per GPU of a node, otherwise 1. With torchrun and one task per
# node, the default is the number of GPUs.
MEGAPPO_RANKS_PER_NODE=${MEGAPPO_RANKS_PER_NODE:-}
# Folder of the logs, relative to the folder of the job. Each job has a subfolder.
MEGAPPO_LOGS=${MEGAPPO_LOGS:-logs}
# yes: `megappo doctor` first runs on all ranks, and the job ends if the doctor reports a broken check.
MEGAPPO_DOCTOR=${MEGAPPO_DOCTOR:-yes}
# Largest number of requested requeues (exit code 85) of a job.
MEGAPPO_MOST_REQUEUES=${MEGAPPO_MOST_REQUEUES:-100}
# Largest number of requeues of a job after a crash: a signal kills a rank, or a device or NCCL fails. The run must have
# written a checkpoint since its last start. 0 disables these requeues.
MEGAPPO_CRASH_REQUEUES=${MEGAPPO_CRASH_REQUEUES:-3}
# yes: the job excludes the node of the rank that failed first, if enough other nodes remain. no: the job may use the node.
MEGAPPO_EXCLUDE_NODES=${MEGAPPO_EXCLUDE_NODES:-yes}

# Only for ppo_disaggregated.sbatch. Number of nodes at the end of the job that generate. The other nodes train. In a
# heterogeneous job the first component trains and the second component generates, without this setting.
MEGAPPO_ENGINE_NODES=${MEGAPPO_ENGINE_NODES:-}
# Default: the largest number that fits on the GPUs of a node with rollout.servers.tensor_parallel; 1 without GPUs.
MEGAPPO_ENGINES_PER_NODE=${MEGAPPO_ENGINES_PER_NODE:-}
# Interface on which engines listen. Every request needs the key of the job. Default: the interface with the address of the
# node.
MEGAPPO_ENGINE_HOST=${MEGAPPO_ENGINE_HOST:-}
# Seconds for which engines still serve requests after the job is cancelled or preempted. Must be less than SLURM's
# KillWait.
MEGAPPO_ENGINE_LINGER=${MEGAPPO_ENGINE_LINGER:-20}

"""Checkpoints: a run that was killed at any point and continued is the run that was not.

A checkpoint is a folder `checkpoints/step-000010` with the shards of actor and critic in the format of
`torch.distributed.checkpoint`, a file of random states per rank, and the marker `checkpoint.json`, which is written
last: it holds the trainer's state, the settings, versions, and size and checksum of every other file. A folder without
a marker was never finished; a folder whose files differ from its marker is damaged. Whoever wrote it, reading it runs
no code: see `reader`.
"""

from megappo.checkpoint.changes import Changes, compare_settings, keep_kl_unit
from megappo.checkpoint.clock import Clock
from megappo.checkpoint.files import CheckpointError, DamagedError, Marker, read_marker, step_folder
from megappo.checkpoint.randomness import random_states, restore_random_states, seed_generators
from megappo.checkpoint.reader import load_values
from megappo.checkpoint.select import NoCheckpointError, find_checkpoint, select_checkpoint, shared_problems
from megappo.checkpoint.shards import load_shards, role_shards, role_updates
from megappo.checkpoint.source import CheckpointSource
from megappo.checkpoint.versions import require_readable
from megappo.checkpoint.writer import CheckpointWriter, Snapshot

__all__ = [
    "Changes",
    "CheckpointError",
    "CheckpointSource",
    "CheckpointWriter",
    "Clock",
    "DamagedError",
    "Marker",
    "NoCheckpointError",
    "Snapshot",
    "compare_settings",
    "find_checkpoint",
    "keep_kl_unit",
    "load_shards",
    "load_values",
    "random_states",
    "read_marker",
    "require_readable",
    "restore_random_states",
    "role_shards",
    "role_updates",
    "seed_generators",
    "select_checkpoint",
    "shared_problems",
    "step_folder",
]

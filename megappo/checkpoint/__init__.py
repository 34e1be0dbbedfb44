"""Checkpoints: a run that was killed and resumed has the same results as an uninterrupted run.

A checkpoint is a folder such as `checkpoints/step-000010`. The folder contains the shards of actor and critic in the
format of `torch.distributed.checkpoint`, a file with random states per rank, and the marker `checkpoint.json`. The
marker is written last. The marker contains the state of the trainer, settings, versions, and the size and checksum of
every other file. A folder without a marker is unfinished. A folder with files that differ from the marker is damaged.
Reading a checkpoint runs no code from the checkpoint (see `reader`).
"""

import megappo.megatron  # noqa: F401 - prepares a machine without CUDA before Megatron-Core is imported

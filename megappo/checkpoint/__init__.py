"""Checkpoints: a run that was killed at any point and continued is the run that was not.

A checkpoint is a folder `checkpoints/step-000010` with the shards of actor and critic in the format of
`torch.distributed.checkpoint`, a file of random states per rank, and the marker `checkpoint.json`, which is written
last: it holds the trainer's state, the settings, versions, and size and checksum of every other file. A folder without
a marker was never finished; a folder whose files differ from its marker is damaged. Whoever wrote it, reading it runs
no code: see `reader`.
"""

import megappo.megatron  # noqa: F401 - prepares a machine without CUDA before Megatron-Core is imported

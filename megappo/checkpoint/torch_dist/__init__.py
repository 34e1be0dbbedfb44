"""Reads and writes checkpoints of Megatron-LM: the format `torch_dist` of `megatron.core.dist_checkpointing`.

A folder contains one checkpoint per iteration, and `latest_checkpointed_iteration.txt` names the newest iteration. A
checkpoint contains tensors in the format of `torch.distributed.checkpoint`, `metadata.json` with the name of the
format, and a pickle with all other data: `common.pt`, or bytes among the tensors. The files are untrusted, and no code
of the files runs.
"""

"""Reads and writes Megatron-LM's own checkpoints: the format `torch_dist` of `megatron.core.dist_checkpointing`.

A folder holds one checkpoint for each iteration, and `latest_checkpointed_iteration.txt` says which is the newest. In a
checkpoint lie tensors as `torch.distributed.checkpoint` writes them, `metadata.json`, which names the format, and a
pickle of everything else: `common.pt`, or bytes among the tensors. None of them is trusted, and nothing that they name
is run.
"""

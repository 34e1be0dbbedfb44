"""A job's processes: their devices, how they start, talk and end.

On a GPU `device`, `process` and `megatron_cpu` do otherwise than on a CPU, and `sglang_cpu` does nothing; what such a
difference means elsewhere stands beside it and asks `Runtime.on_cuda`. All other modules know no devices.
"""

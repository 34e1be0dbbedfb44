"""Processes of a job: their devices, and how they start, communicate and end.

`device`, `process` and `megatron_cpu` behave differently on a GPU and on a CPU.
Elsewhere such a difference asks `Runtime.on_cuda` and states its reason. All other modules do not depend on the device.
"""

"""Processes of a job: their devices, and how they start, communicate and end.

`device` and `process` behave differently on a GPU and on a CPU. Other code with such a difference checks
`Runtime.on_cuda` and documents the reason. All other modules do not depend on the device.
"""

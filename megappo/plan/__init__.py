"""The plan of a run, made before it is queued: bytes on every rank, FLOPs and seconds of every stage.

Everything here is arithmetic on the settings and the models' config.json; nothing is built and no device is touched.
"""

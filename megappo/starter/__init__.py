"""Writes a first configuration for the machine that it is asked on (`megappo init`)."""

"""Writes a first configuration for the machine that it runs on (`megappo init`)."""

"""Processes of the servers: start, inspection, restart and end."""

"""Machines and their rates."""

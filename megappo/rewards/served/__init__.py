"""Servers of judges and of reward models."""

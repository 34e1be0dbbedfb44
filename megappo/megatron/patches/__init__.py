"""Replaced functions of Megatron-Core, with the versions and the reasons."""

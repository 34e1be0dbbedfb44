"""Conversion between Hugging Face tensors and Megatron shards."""

"""Converts between Hugging Face tensors and Megatron's shards, and streams weights between layouts."""

"""Between Hugging Face's tensors and Megatron's shards."""

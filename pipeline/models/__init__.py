"""Hugging Face models in training: loading, score heads, LoRA, parallelism, export."""

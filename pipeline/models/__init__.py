"""Hugging Face models as this project trains them: loading, score heads, LoRA, export."""

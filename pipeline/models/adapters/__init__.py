"""LoRA adapters, and frozen bases in 4 or 8 bits."""

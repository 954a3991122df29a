"""Products of bf16 matrices, where the processor has no instructions for them."""

"""Corpora as Megatron's indexed token files: packing, reading, and the rows of step 0."""

"""Instruction following that programs check (Zhou et al. 2023, arXiv:2311.07911)."""

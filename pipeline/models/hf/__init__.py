"""Hugging Face directories: checks, loading, chat formats, export."""

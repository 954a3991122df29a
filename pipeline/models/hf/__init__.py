"""Hugging Face directories and GGUF files: checks, loading, chat formats, export."""

"""An OpenAI-compatible server on the generation engine: `python -m inference.serve`."""

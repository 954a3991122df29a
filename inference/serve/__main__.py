"""Serve models: `python -m inference.serve --path OUT/step3_ppo/actor`, for OpenAI's clients."""

from inference.serve.command import main
from pipeline.cli.options import run_main

if __name__ == "__main__":
    run_main(main)

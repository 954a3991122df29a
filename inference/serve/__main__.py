"""Serve models to OpenAI clients: `python -m inference.serve --path OUT/step3_ppo/actor`."""

from inference.serve.command import main
from pipeline.cli.options import run_main

if __name__ == "__main__":
    run_main(main)

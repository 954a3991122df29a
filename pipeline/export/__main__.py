"""Export a model: `python -m pipeline.export --path OUT --to gguf --out exported`."""

from pipeline.cli.options import run_main
from pipeline.export.command import main

if __name__ == "__main__":
    run_main(main)

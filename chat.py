"""Chat with a trained model: `python chat.py --path OUT/step3_ppo/actor`."""

from pipeline.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from inference.chat import main
from pipeline.cli.options import run_main

if __name__ == "__main__":
    run_main(main)

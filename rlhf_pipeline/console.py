"""Console scripts of the installed package.

`rlhf` runs `train.py`, `rlhf-chat` runs `chat.py`, and `rlhf-serve` runs
`python -m inference.serve`.
"""

import rlhf_pipeline


def _prepare() -> None:
    rlhf_pipeline.add_to_path()
    from pipeline.system.signals import exit_on_interrupt

    exit_on_interrupt()


def train() -> None:
    """Run `rlhf`: the three steps, with the options of `train.py`."""
    _prepare()
    from pipeline.cli.options import run_main
    from train import main

    run_main(main)


def chat() -> None:
    """Run `rlhf-chat`: talk to a model, with the options of `chat.py`."""
    _prepare()
    from inference.chat import main
    from pipeline.cli.options import run_main

    run_main(main)


def serve() -> None:
    """Run `rlhf-serve`: serve models, with the options of `python -m inference.serve`."""
    _prepare()
    from inference.serve.command import main
    from pipeline.cli.options import run_main

    run_main(main)

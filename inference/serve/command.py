"""The command `python -m inference.serve`."""

import importlib.util
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from inference.serve.config import ServeConfig, read_keys
from pipeline.cli.options import parse_command, print_notice, print_output
from pipeline.system.errors import ConfigError
from pipeline.system.installation import MODULE
from pipeline.system.logs import configure_logging

if TYPE_CHECKING:
    from inference.ratings import RatingsFile

REQUIRED_PACKAGES = ("starlette", "uvicorn", "pydantic")


def main(argv: Sequence[str]) -> None:
    """Load the models, then serve until SIGTERM or Ctrl-C.

    Raises:
        UserError: a setting is wrong, a model is missing or doesn't fit, or the port is taken.
    """
    config = parse_command(
        ServeConfig,
        argv,
        usage=(
            f"{MODULE} inference.serve --path DIR [--path NAME=DIR ...] [--SETTING VALUE ...]",
            f"{MODULE} inference.serve --run OUT [--SETTING VALUE ...]",
        ),
        about="Serve models to OpenAI clients, with a web page to chat, compare and rate"
        " (see docs/serving.md).",
    )
    for name in REQUIRED_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'{name} is missing; run `pip install "rlhf-pipeline[serve]"`')
    keys = read_keys(config)

    from inference.serve.models import collect_models, find_run_reward, load_models
    from inference.serve.server import listen, serve
    from inference.serve.state import State

    paths = collect_models(config)
    configure_logging(is_main=True)
    reward = config.reward or (find_run_reward(config.run) if config.run else None)
    with closing(listen(config)) as listener:  # before the slow loading of models
        models, served_reward = load_models(config, paths, reward)
        state = State(config, keys, models, reward=served_reward, ratings=_open_ratings(config))
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if not config.is_local and not keys:
            print_notice("no API key is set; anyone who can reach this port can use the models")
        if state.ratings is not None:
            print_notice(f"ratings are saved to {state.ratings.path}")
        content = "page and API" if config.page else "API"
        print_output(f"{url} : {content} (base URL for OpenAI clients: {url}/v1)")
        serve(state, listener)


def _open_ratings(config: ServeConfig) -> "RatingsFile | None":
    """Open the ratings file; return None if there is none or a run's directory is read-only."""
    from inference.ratings import RatingsFile

    path = config.ratings or (config.run and config.run / "ratings.jsonl")
    if path is None:
        return None
    try:
        return RatingsFile(path)
    except ConfigError as error:
        if config.ratings is not None:
            raise
        print_notice(f"ratings are disabled: {error}")
        return None

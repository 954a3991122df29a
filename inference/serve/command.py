"""The command `python -m inference.serve`: from options to a server that answers."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from inference.serve.config import ServeConfig, read_keys
from pipeline.cli import remark, say
from pipeline.command import joined, read_command
from pipeline.errors import ConfigError
from pipeline.installation import MODULE
from pipeline.logs import configure_logging

if TYPE_CHECKING:
    from inference.ratings.file import RatingsFile
    from inference.serve.models import ModelPath

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def main(argv: Sequence[str]) -> None:
    """Load the models, then answer requests until SIGTERM or Ctrl-C.

    Raises:
        UserError: a wrong setting, no model at a path, no room for it, or a port that is taken.
    """
    from inference.serve.models import paths_to_serve

    config = read_command(
        ServeConfig,
        argv,
        usage=(
            f"{MODULE} inference.serve --path DIR [--path NAME=DIR ...] [--SETTING VALUE ...]",
            f"{MODULE} inference.serve --path DIR --adapter NAME=DIR [--adapter ...] [...]",
            f"{MODULE} inference.serve --run OUT [--SETTING VALUE ...]",
            f"{MODULE} inference.serve --watch OUT [--SETTING VALUE ...]",
        ),
        about="Serve models to OpenAI's clients, with a page to chat, compare and rate:"
        " docs/serving.md.",
        gather=joined("path", "adapter", "api_key", "cors"),
    )
    require_packages()
    keys = read_keys(config)
    places = paths_to_serve(config)
    configure_logging(is_main=True)
    _serve(config, places, keys)


def _serve(config: ServeConfig, places: Sequence["ModelPath"], keys: Mapping[str, str]) -> None:
    """Listen, load, and answer until the end."""
    from inference.serve.loading import load
    from inference.serve.models import reward_of_run
    from inference.serve.server import listen, serve
    from inference.serve.watch import WatchedRun

    reward = config.reward or (reward_of_run(config.run) if config.run else None)
    seen = config.watch or config.run
    ratings = open_ratings(config)
    watched = WatchedRun(seen) if seen is not None else None
    with closing(listen(config)) as listener:  # before the models, which take long
        state = load(config, places, reward, keys)
        state.ratings, state.watched = ratings, watched
        host, port = listener.getsockname()[:2]
        scheme = "https" if config.tls_cert else "http"
        name = f"[{host}]" if ":" in host else host
        if not config.is_local and not keys:
            remark("there is no key: whoever reaches this port uses the models")
        if ratings is not None:
            remark(f"ratings go to {ratings.path}")
        what = "page and API" if config.page else "API"
        say(f"{scheme}://{name}:{port} : {what} (OpenAI's clients: {scheme}://{name}:{port}/v1)")
        serve(state, listener)


def open_ratings(config: ServeConfig) -> "RatingsFile | None":
    """The file of ratings; of a run that can't be written to, none.

    Raises:
        ConfigError: a file that was named can't be written.
    """
    from inference.ratings.file import RatingsFile

    path = config.ratings_path
    if path is None:
        return None
    try:
        return RatingsFile(path)
    except ConfigError as error:
        if config.ratings is not None:
            raise
        remark(f"no ratings are taken: {error}")
        return None


def require_packages() -> None:
    """Raise ConfigError where a package of the extra `serve` is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'the package {missing[0]} is missing: pip install "rlhf-pipeline[serve]"'
        )

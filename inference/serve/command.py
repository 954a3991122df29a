"""The command `python -m inference.serve`: from options to a server that answers."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from inference.serve.config import ServeConfig, read_keys
from pipeline.cli import remark, say
from pipeline.command import joined, read_command
from pipeline.errors import ConfigError, require
from pipeline.installation import MODULE
from pipeline.logs import configure_logging
from pipeline.parallel import launched
from pipeline.parallel.group import ALONE, Group

if TYPE_CHECKING:
    from inference.ratings.file import RatingsFile
    from inference.serve.models import ModelPath

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")

PATIENCE = 600.0
"""Seconds for which one process may keep the others waiting, as while a model is loaded."""


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
            "torchrun --nproc-per-node N -m inference.serve --path DIR [...]",
        ),
        about="Serve models to OpenAI's clients, with a page to chat, compare and rate:"
        " docs/serving.md.",
        gather=joined("path", "adapter", "api_key", "cors"),
    )
    require_packages()
    keys = read_keys(config)
    if launched.world_size() > 1:
        check_divided(config)
    places = paths_to_serve(config)
    if launched.world_size() == 1:
        configure_logging(is_main=True)
        _serve(config, places, keys)
    else:
        _serve_together(config, places, keys)


def _serve_together(
    config: ServeConfig, places: Sequence["ModelPath"], keys: Mapping[str, str]
) -> None:
    """Divide the models among the processes that torchrun started; the first one listens."""
    from inference.serve.followers import follow
    from inference.serve.loading import load
    from pipeline.parallel.mesh import current_mesh
    from pipeline.parallel.process_group import process_group
    from pipeline.watchdog.process import watching

    with process_group(watching, PATIENCE):
        world = current_mesh().world
        configure_logging(is_main=world.rank == 0)
        group = current_mesh().tp_group(world.size, timeout_seconds=PATIENCE)
        if group.rank == 0:
            _serve(config, places, keys, group)
        else:
            follow(load(config, places, None, keys, group).models, group)


def _serve(
    config: ServeConfig,
    places: Sequence["ModelPath"],
    keys: Mapping[str, str],
    group: Group = ALONE,
) -> None:
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
        state = load(config, places, reward, keys, group)
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


def check_divided(config: ServeConfig) -> None:
    """Refuse what several processes don't serve.

    Raises:
        ConfigError: there is an adapter, or no model to divide.
    """
    require(
        not config.adapter,
        "--adapter isn't served by several processes: merge it, python -m pipeline.export --to"
        " merged, and give the result as --path",
    )
    require(
        bool(config.path or config.run),
        "several processes divide models among them, and --watch has none; start it without"
        " torchrun",
    )


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

"""What the page asks beside OpenAI's routes: what is served, ratings, a run as it learns."""

import asyncio
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from inference.ratings.agreement import agreement
from inference.ratings.file import RatingsFile, read_ratings, standing_ratings
from inference.serve.body import read_json
from inference.serve.errors import ApiError, json_response
from inference.serve.schema import RatingRequest, UndoRequest, read_request
from inference.serve.state import State, client_of, state_of
from pipeline.errors import DataError


async def server(request: Request) -> Response:
    """`GET /api/server`: what there is to show."""
    state = state_of(request)
    return json_response(
        {
            "models": [{"id": name} for name in state.models],
            "reward": state.reward is not None,
            "ratings": state.ratings is not None,
            "watch": state.watched is not None,
        }
    )


async def add_rating(request: Request) -> Response:
    """`POST /api/ratings`: append a rating; it is on the disk once its id comes back."""
    state = state_of(request)
    body = await _body(request, state)
    rating, _ = read_request(RatingRequest, body)
    line = rating.model_dump(mode="json")
    line["rater"] = line["rater"] or _key_name(request)
    try:
        name = await asyncio.to_thread(_file(state).add, line)
    except DataError as error:
        raise ApiError(503, str(error)) from None
    return json_response({"id": name})


async def undo_rating(request: Request) -> Response:
    """`POST /api/ratings/undo`: take one back, by a line of its own."""
    state = state_of(request)
    undo, _ = read_request(UndoRequest, await _body(request, state))
    try:
        await asyncio.to_thread(_file(state).undo, undo.id, undo.rater or _key_name(request))
    except KeyError:
        raise ApiError(404, "there is no rating of this id", param="id") from None
    except DataError as error:
        raise ApiError(503, str(error)) from None
    return json_response({"id": undo.id})


async def summary(request: Request) -> Response:
    """`GET /api/ratings/summary`: how many there are, and how far raters agree."""
    file = _file(state_of(request))
    try:
        found = await asyncio.to_thread(
            lambda: agreement(standing_ratings(read_ratings(file.path)))
        )
    except (DataError, KeyError, TypeError, IndexError) as error:
        raise ApiError(503, f"{file.path.name} can't be read: {error}") from None
    return json_response({"path": file.path.name, **asdict(found)})


def _file(state: State) -> RatingsFile:
    if state.ratings is None:
        raise ApiError(404, "no ratings are taken; start the server with --ratings FILE")
    return state.ratings


def _key_name(request: Request) -> str:
    """The name of the request's key, or nothing: addresses are not kept."""
    return client_of(request) if request.scope.get("key_name") else ""


async def watch(request: Request) -> Response:
    """`GET /api/watch`: curves, alarms and samples of a run, as far as it is now."""
    watched = state_of(request).watched
    if watched is None:
        raise ApiError(404, "no run is watched; start the server with --watch OUT")
    query = request.query_params
    step, version = query.get("step", ""), query.get("version", "")
    return json_response(await asyncio.to_thread(watched.view, step, version))


async def _body(request: Request, state: State) -> dict[str, object]:
    config = state.config
    return await read_json(request, limit=config.max_body, seconds=config.idle_seconds)

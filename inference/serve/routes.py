"""The routes of the server: models, health, tokens, scores, and the page with its data."""

import asyncio
import mimetypes
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from inference.ratings import RatingsFile, active_ratings, count_pairs, read_ratings
from inference.serve.completions import chat_completions, completions, new_id
from inference.serve.http import (
    CLIENT_CLOSED,
    ApiError,
    ClientDisconnected,
    cancel_on_disconnect,
    json_response,
    read_body,
)
from inference.serve.models import ServedModel
from inference.serve.schema import (
    RatingRequest,
    ScoreRequest,
    TokenizeRequest,
    UndoRequest,
    read_request,
)
from inference.serve.security import AccessControl
from inference.serve.state import State, get_client, get_state
from inference.text import encode_text
from pipeline import __version__
from pipeline.system.errors import DataError

PAGE = Path(__file__).parent / "page"


def build_app(state: State) -> ASGIApp:
    """Build the ASGI application of a server."""
    get, post = ["GET"], ["POST"]
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=post),
        Route("/v1/completions", completions, methods=post),
        Route("/v1/models", models, methods=get),
        Route("/v1/models/{name:path}", model, methods=get),
        Route("/v1/score", score, methods=post),
        Route("/tokenize", tokenize, methods=post),
        Route("/health", health, methods=get),
        Route("/ready", ready, methods=get),
        Route("/version", version, methods=get),
        Route("/api/server", server, methods=get),
        Route("/api/ratings", add_rating, methods=post),
        Route("/api/ratings/undo", undo_rating, methods=post),
        Route("/api/ratings/summary", summary, methods=get),
    ]
    pages = page_routes() if state.config.page else []
    app = Starlette(
        routes=[*routes, *pages],
        exception_handlers={
            ApiError: _handle_api_error,
            HTTPException: _handle_http_error,
            ClientDisconnected: _handle_disconnect,
            Exception: _handle_error,
        },
    )
    app.state.server = state
    return AccessControl(app, state, frozenset({"/health", *(route.path for route in pages)}))


async def _handle_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response


async def _handle_disconnect(*_: object) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _handle_error(*_: object) -> Response:
    return ApiError(500, "internal server error; see the server's log").response


async def _handle_http_error(request: Request, error: Exception) -> Response:
    """Reject an unknown path or method."""
    assert isinstance(error, HTTPException)
    messages = {404: "no such path", 405: f"this path does not support {request.method}"}
    message = messages.get(error.status_code, "the request can't be read")
    response = ApiError(error.status_code, message).response
    response.headers.update(error.headers or {})  # methods that the path allows
    return response


def page_routes() -> list[Route]:
    """Return a route for each file of the web page, which is served at /."""
    routes: list[Route] = []
    for file in sorted(PAGE.glob("*.*")):
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        content_type = mimetypes.guess_type(file.name)[0]
        handler = partial(_serve_file, file.read_bytes(), content_type)
        routes.append(Route(path, handler, methods=["GET"]))
    return routes


async def _serve_file(content: bytes, media_type: str | None, _: Request) -> Response:
    return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})


async def models(request: Request) -> Response:
    """`GET /v1/models`: the served models."""
    state = get_state(request)
    data = [_describe_model(state, served) for served in state.models.values()]
    return json_response({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """`GET /v1/models/{id}`: one of the served models."""
    state = get_state(request)
    return json_response(_describe_model(state, state.model(request.path_params["name"])))


def _describe_model(state: State, served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": state.created,
        "owned_by": "rlhf",
        "context": served.context,
        "slots": served.num_slots,
        "weights_hash": served.weights_hash,
        "chat_format": served.chat.name,
    }


async def health(_: Request) -> Response:
    """`GET /health`: the process is alive."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """`GET /ready`: status 200 if requests are admitted, otherwise 503."""
    broker = get_state(request).broker
    status = "ready" if broker.is_ready else "draining" if broker.draining else "not ready"
    return json_response({"status": status}, status=200 if broker.is_ready else 503)


async def version(_: Request) -> Response:
    """`GET /version`: the version of this package."""
    return json_response({"version": __version__})


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: token ids of a text, or of a dialogue rendered with the chat template."""
    state = get_state(request)
    fields, _ = read_request(TokenizeRequest, await read_body(request))
    served = state.model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "provide either prompt or messages", param="prompt")
    if fields.messages is not None:
        messages = [item.message for item in fields.messages]
        ids = await asyncio.to_thread(
            served.encode_chat,
            messages,
            continues=fields.adds_prompt and messages[-1].role == "assistant",
            adds_prompt=fields.adds_prompt,
            arguments=fields.chat_template_kwargs,
        )
    else:
        text, special = fields.prompt or "", fields.add_special_tokens
        ids = await asyncio.to_thread(encode_text, served.tokenizer, text, special=special)
    return json_response({"count": len(ids), "max_model_len": served.context, "tokens": ids})


async def score(request: Request) -> Response:
    """`POST /v1/score`: the reward model's score of a dialogue's last response."""
    state = get_state(request)
    fields, _ = read_request(ScoreRequest, await read_body(request))
    reward = state.reward
    if reward is None:
        raise ApiError(
            404, "no reward model is served; start the server with --reward DIR", param="model"
        )
    messages = [item.message for item in fields.messages]
    dialogue = await asyncio.to_thread(reward.encode, messages)
    call = state.broker.call(lambda: reward.score(dialogue))
    value = await cancel_on_disconnect(request.receive, call)
    return json_response(
        {
            "id": new_id("score"),
            "object": "score",
            "model": reward.name,
            "score": value,
            "usage": {"prompt_tokens": len(dialogue), "total_tokens": len(dialogue)},
        }
    )


async def server(request: Request) -> Response:
    """`GET /api/server`: the models, and whether a reward model and ratings are available."""
    state = get_state(request)
    return json_response(
        {
            "models": [{"id": name} for name in state.models],
            "max_tokens": state.config.max_tokens_default,
            "reward": state.reward is not None,
            "ratings": state.ratings is not None,
        }
    )


async def add_rating(request: Request) -> Response:
    """`POST /api/ratings`: append a rating; its id is returned once it is on disk."""
    state = get_state(request)
    rating, _ = read_request(RatingRequest, await read_body(request))
    line = rating.model_dump(mode="json")
    line["rater"] = line["rater"] or _key_name(request)
    try:
        rating_id = await asyncio.to_thread(_ratings(state).add, line)
    except DataError as error:
        raise ApiError(503, str(error)) from None
    return json_response({"id": rating_id})


async def undo_rating(request: Request) -> Response:
    """`POST /api/ratings/undo`: revoke a rating by appending a line."""
    state = get_state(request)
    undo, _ = read_request(UndoRequest, await read_body(request))
    try:
        await asyncio.to_thread(_ratings(state).undo, undo.id, undo.rater or _key_name(request))
    except KeyError:
        raise ApiError(404, "no rating has this id", param="id") from None
    except DataError as error:
        raise ApiError(503, str(error)) from None
    return json_response({"id": undo.id})


async def summary(request: Request) -> Response:
    """`GET /api/ratings/summary`: the number of ratings and of compared pairs."""
    ratings_file = _ratings(get_state(request))
    try:
        ratings = active_ratings(await asyncio.to_thread(read_ratings, ratings_file.path))
    except (DataError, TypeError) as error:
        raise ApiError(503, f"{ratings_file.path.name} can't be read: {error}") from None
    counts = {"ratings": len(ratings), "pairs": count_pairs(ratings)}
    return json_response({"path": ratings_file.path.name, **counts})


def _ratings(state: State) -> RatingsFile:
    if state.ratings is None:
        raise ApiError(404, "ratings are not enabled; start the server with --ratings FILE")
    return state.ratings


def _key_name(request: Request) -> str:
    """Return the name of the request's API key, or "" if it has none (unlike `get_client`)."""
    return get_client(request) if request.scope.get("key_name") else ""

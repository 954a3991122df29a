"""Routes besides completions: models, health, metrics, tokens, scores, and those of the page."""

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.ratings.agreement import agreement
from inference.ratings.file import RatingsFile, read_ratings, standing_ratings
from inference.serve.http import ApiError, json_response, until_gone
from inference.serve.objects import new_id
from inference.serve.schema import (
    DetokenizeRequest,
    RatingRequest,
    ScoreRequest,
    TokenizeRequest,
    UndoRequest,
    read_request,
)
from inference.serve.served import ServedModel
from inference.serve.state import State, client_of, off_loop, read_body, size_of, state_of
from inference.streaming import plain_text
from pipeline import __version__
from pipeline.errors import DataError


async def models(request: Request) -> Response:
    """`GET /v1/models`."""
    state = state_of(request)
    return json_response(
        {"object": "list", "data": [_model(state, each) for each in state.models.values()]}
    )


async def model(request: Request) -> Response:
    """`GET /v1/models/{id}`."""
    state = state_of(request)
    return json_response(_model(state, state.model(request.path_params["name"])))


def _model(state: State, served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": state.created,
        "owned_by": "rlhf",
        "parent": served.base,
        "context": served.context,
        "slots": served.lane.num_slots,
        "weights_hash": served.weights_hash,
        "chat_format": served.chat.name,
    }


async def health(request: Request) -> Response:
    """`GET /health`: the process is alive."""
    del request
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """`GET /ready`: requests are let in; else 503."""
    state = state_of(request)
    broker = state.broker
    status = "ready" if broker.is_ready else "draining" if broker.draining else "not ready"
    return json_response({"status": status}, status=200 if broker.is_ready else 503)


async def metrics(request: Request) -> Response:
    """`GET /metrics`, for Prometheus."""
    return Response(state_of(request).metrics.text, media_type="text/plain; version=0.0.4")


async def version(request: Request) -> Response:
    """`GET /version`."""
    del request
    return json_response({"version": __version__})


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: the token ids of a text, or of a dialogue as it is prompted with."""
    state = state_of(request)
    fields, _ = read_request(TokenizeRequest, await read_body(request))
    served = state.model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if fields.messages is not None:
        messages = [each.message for each in fields.messages]
        ids = await off_loop(
            size_of(messages, fields.chat_template_kwargs),
            served.encode_chat,
            messages,
            continues=fields.opens and messages[-1].role == "assistant",
            opens=fields.opens,
            arguments=fields.chat_template_kwargs,
        )
    else:
        text = fields.prompt or ""
        ids = await off_loop(len(text), served.encode_text, text, special=fields.add_special_tokens)
    return json_response({"count": len(ids), "max_model_len": served.context, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the text of token ids, without special ones."""
    state = state_of(request)
    fields, _ = read_request(DetokenizeRequest, await read_body(request))
    served = state.model(fields.model)
    known = len(served.tokenizer)
    if any(token >= known for token in fields.tokens):
        raise ApiError(400, f"tokens must lie in [0, {known - 1}]", param="tokens")
    return json_response({"prompt": plain_text(served.tokenizer, fields.tokens)})


async def score(request: Request) -> Response:
    """`POST /v1/score`: the reward model's score of a dialogue's last response."""
    state = state_of(request)
    fields, _ = read_request(ScoreRequest, await read_body(request))
    reward = state.reward
    if reward is None:
        raise ApiError(
            404, "no reward model is served; start the server with --reward DIR", param="model"
        )
    dialogue = reward.encode([each.message for each in fields.messages])
    value = await until_gone(request.receive, state.broker.call(lambda: reward.score(dialogue)))
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
    body = await read_body(request)
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
    undo, _ = read_request(UndoRequest, await read_body(request))
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

"""Models, health, metrics, tokens and scores."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.serve.body import read_json
from inference.serve.errors import ApiError, json_response
from inference.serve.openai_objects import new_id
from inference.serve.schema import (
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
    read_request,
)
from inference.serve.served import ServedModel
from inference.serve.state import State, off_loop, size_of, state_of
from inference.serve.stream import until_gone
from inference.streaming import plain_text
from pipeline import __version__


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
    fields, _ = read_request(TokenizeRequest, await _body(request, state))
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
    fields, _ = read_request(DetokenizeRequest, await _body(request, state))
    served = state.model(fields.model)
    known = len(served.tokenizer)
    if any(token >= known for token in fields.tokens):
        raise ApiError(400, f"tokens must lie in [0, {known - 1}]", param="tokens")
    return json_response({"prompt": plain_text(served.tokenizer, fields.tokens)})


async def score(request: Request) -> Response:
    """`POST /v1/score`: the reward model's score of a dialogue's last response."""
    state = state_of(request)
    fields, _ = read_request(ScoreRequest, await _body(request, state))
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


async def _body(request: Request, state: State) -> dict[str, Any]:
    config = state.config
    return await read_json(request, limit=config.max_body, seconds=config.idle_seconds)

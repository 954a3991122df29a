"""The routes of the server, behind its door."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from inference.serve import routes_other, routes_page
from inference.serve.errors import KINDS, LEFT, ApiError
from inference.serve.page_files import page_routes
from inference.serve.routes_chat import chat_completions
from inference.serve.routes_completions import completions
from inference.serve.security import Doorkeeper
from inference.serve.state import State
from inference.serve.stream import ClientGone


def build_app(state: State) -> ASGIApp:
    """What answers the requests of a server."""
    get, post = ["GET"], ["POST"]
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=post),
        Route("/v1/completions", completions, methods=post),
        Route("/v1/models", routes_other.models, methods=get),
        Route("/v1/models/{name:path}", routes_other.model, methods=get),
        Route("/v1/score", routes_other.score, methods=post),
        Route("/tokenize", routes_other.tokenize, methods=post),
        Route("/detokenize", routes_other.detokenize, methods=post),
        Route("/health", routes_other.health, methods=get),
        Route("/ready", routes_other.ready, methods=get),
        Route("/version", routes_other.version, methods=get),
        Route("/api/server", routes_page.server, methods=get),
        Route("/api/ratings", routes_page.add_rating, methods=post),
        Route("/api/ratings/undo", routes_page.undo_rating, methods=post),
        Route("/api/ratings/summary", routes_page.summary, methods=get),
        Route("/api/watch", routes_page.watch, methods=get),
    ]
    if state.config.metrics:
        routes.append(Route("/metrics", routes_other.metrics, methods=get))
    pages = page_routes() if state.config.page else []
    app = Starlette(
        routes=[*routes, *pages],
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _refuse_route,
            ClientGone: _leave,
            Exception: _fail,
        },
    )
    app.state.server = state
    return Doorkeeper(
        app,
        config=state.config,
        keys=state.keys,
        open_paths=frozenset({"/health", *(route.path for route in pages)}),
        metrics=state.metrics,
    )


async def _refuse(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return error.response


async def _leave(request: Request, error: Exception) -> Response:
    """Nobody reads it."""
    del request, error
    return Response(status_code=LEFT)


async def _fail(request: Request, error: Exception) -> Response:
    del request, error
    return ApiError(500, "the server failed; its log says why").response


async def _refuse_route(request: Request, error: Exception) -> Response:
    """No such path, or not by this method."""
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in KINDS else 400
    what = {404: "there is no such path", 405: f"this path takes no {request.method}"}
    return ApiError(status, what.get(status, "the request can't be read")).response

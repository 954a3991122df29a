"""The routes of the server, and the files of the page."""

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from inference.serve import routes
from inference.serve.completions import chat_completions, completions
from inference.serve.http import KINDS, LEFT, ApiError, ClientGone
from inference.serve.security import Doorkeeper
from inference.serve.state import State

HERE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


VIEWS = ("chat", "compare", "rate", "watch")


def build_app(state: State) -> ASGIApp:
    """What answers the requests of a server."""
    get, post = ["GET"], ["POST"]
    listed = [
        Route("/v1/chat/completions", chat_completions, methods=post),
        Route("/v1/completions", completions, methods=post),
        Route("/v1/models", routes.models, methods=get),
        Route("/v1/models/{name:path}", routes.model, methods=get),
        Route("/v1/score", routes.score, methods=post),
        Route("/tokenize", routes.tokenize, methods=post),
        Route("/detokenize", routes.detokenize, methods=post),
        Route("/health", routes.health, methods=get),
        Route("/ready", routes.ready, methods=get),
        Route("/version", routes.version, methods=get),
        Route("/api/server", routes.server, methods=get),
        Route("/api/ratings", routes.add_rating, methods=post),
        Route("/api/ratings/undo", routes.undo_rating, methods=post),
        Route("/api/ratings/summary", routes.summary, methods=get),
        Route("/api/watch", routes.watch, methods=get),
    ]
    if state.config.metrics:
        listed.append(Route("/metrics", routes.metrics, methods=get))
    pages = page_routes() if state.config.page else []
    app = Starlette(
        routes=[*listed, *pages],
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


def page_routes() -> list[Route]:
    """A route for each file; the page itself is at /, and its views can be typed by name."""
    files = [file for file in sorted(HERE.iterdir()) if file.suffix in TYPES]
    return [*(_route(file) for file in files), *(_to_view(name) for name in VIEWS)]


def _to_view(name: str) -> Route:
    async def redirect(request: Request) -> Response:
        del request
        return RedirectResponse(f"/#{name}")

    return Route(f"/{name}", redirect, methods=["GET"])


def _route(file: Path) -> Route:
    content = file.read_bytes()

    async def serve(request: Request) -> Response:
        del request
        return Response(
            content, media_type=TYPES[file.suffix], headers={"Cache-Control": "no-cache"}
        )

    path = "/" if file.name == "index.html" else f"/page/{file.name}"
    return Route(path, serve, methods=["GET"])

"""The page's own files, read once and served as they are."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

HERE = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


VIEWS = ("chat", "compare", "rate", "watch")


def page_routes() -> list[Route]:
    """A route for each file; the page itself is at /, and its views can be typed by name."""
    files = [file for file in sorted(HERE.iterdir()) if file.suffix in KINDS]
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
            content, media_type=KINDS[file.suffix], headers={"Cache-Control": "no-cache"}
        )

    path = "/" if file.name == "index.html" else f"/page/{file.name}"
    return Route(path, serve, methods=["GET"])

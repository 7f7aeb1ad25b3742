"""The page at `/`: files of this package, nothing from elsewhere."""

from importlib.resources import files

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
POLICY = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_to(app: FastAPI) -> None:
    """Registers the page and its files."""
    folder = files("dinfer.server") / "web"

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def file_(name: str) -> Response:
        return file(name)

    def file(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, f"There is no {name!r} here.")
        return Response((folder / name).read_bytes(), 200, POLICY, FILES[name])

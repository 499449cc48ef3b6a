"""OPTIONS of paths with several methods."""

from __future__ import annotations

from litestar import Response, route
from litestar.handlers import HTTPRouteHandler


def options_of(*handlers: HTTPRouteHandler) -> HTTPRouteHandler:
    """Return the route that answers OPTIONS for the path of these handlers with all their methods. Litestar's own
    answer names only the first."""
    (path,) = {path for handler in handlers for path in handler.paths}
    methods = {"OPTIONS"}.union(*(handler.http_methods for handler in handlers))

    @route(path, http_method="OPTIONS", status_code=204, include_in_schema=False)
    async def options() -> Response[None]:
        return Response(None, headers={"allow": ", ".join(sorted(methods))})

    return options

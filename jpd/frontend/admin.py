"""Routes for operators: which workers there are, drain, change of role, remove, add.

Only for callers on this machine, or with the token of [security] token_file. A request that a proxy
has handed on is not from this machine. Mounted by `http_app`; `jpd workers` calls them.
"""

import hmac
from dataclasses import asdict
from typing import Annotated, cast, get_args

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import Response

from jpd.errors import RequestError
from jpd.frontend.api_page import errors
from jpd.frontend.errors import RouteError
from jpd.frontend.responses import json_response
from jpd.frontend.workforce import Workforce
from jpd.rpc.security import is_loopback
from jpd.worker.protocol import Role

PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class AdminRoutes:
    """The routes; `router` goes into the app."""

    def __init__(self, workforce: Workforce, token: str | None) -> None:
        self._workforce, self._token = workforce, token
        self.router = APIRouter(
            prefix="/admin",
            tags=["operators"],
            responses=errors(400, 403, 404, 503),
            dependencies=[Depends(self._check)],
        )
        add = self.router.add_api_route
        add("/workers", self.workers, methods=["GET"], response_model=None)
        add("/workers/{name}/drain", self.drain, methods=["POST"], response_model=None)
        add("/workers/{name}/role", self.set_role, methods=["POST"], response_model=None)
        add("/workers/{name}", self.remove, methods=["DELETE"], response_model=None)
        add("/hosts/{name}", self.add_host, methods=["POST"], response_model=None)

    async def workers(self) -> Response:
        """Every worker with its host, role, state and load."""
        return self._answer()

    async def drain(self, name: str) -> Response:
        """Gives the worker nothing new; answers when all that it had has ended."""
        await self._workforce.drain(name)
        return self._answer()

    async def set_role(self, name: str, role: Annotated[str, Body(embed=True)]) -> Response:
        """Drains the worker, changes its role and lets it take part again."""
        if role not in get_args(Role):
            raise RequestError("role", role, f"must be one of {', '.join(get_args(Role))}")
        await self._workforce.set_role(name, cast(Role, role))
        return self._answer()

    async def remove(self, name: str) -> Response:
        """Drains the worker and forgets it; its host ends with its last worker."""
        await self._workforce.remove(name)
        return self._answer()

    async def add_host(self, name: str) -> Response:
        """Starts a [[host]] that was added to the mesh file, with its workers."""
        await self._workforce.add_host(name)
        return self._answer()

    def _answer(self) -> Response:
        return json_response({"workers": [asdict(line) for line in self._workforce.lines()]})

    async def _check(self, request: Request) -> None:
        """Raises RouteError 403 for who is not an operator."""
        shown = request.headers.get("authorization", "")
        if self._token and hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
            return
        is_here = request.client is not None and is_loopback(request.client.host)
        if not is_here or any(header in request.headers for header in PROXY_HEADERS):
            reason = "only for callers on this machine, or with the operators' token"
            raise RouteError(403, reason, "forbidden")

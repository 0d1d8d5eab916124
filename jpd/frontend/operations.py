"""Routes beside generation: health, version, metrics, timeline, tokenize, detokenize.

Knows TextService and callables that tell health and metrics; no router. Mounted by `http_app`.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from jpd.errors import RequestError
from jpd.frontend.api_page import (
    COUNT,
    HEALTH,
    TEXT,
    WITH_BODY,
    Responses,
    errors,
    json_answer,
    object_of,
    text_answer,
)
from jpd.frontend.messages import read_messages
from jpd.frontend.refusals import check_extra_fields
from jpd.frontend.responses import json_response
from jpd.frontend.schemas import DetokenizeBody, TokenizeBody
from jpd.frontend.service import TextService
from jpd.frontend.tool_fields import read_tools
from jpd.frontend.workforce import Workforce
from jpd.metrics import CONTENT_TYPE
from jpd.router.activity import Activity
from jpd.router.health import WorkerHealth
from jpd.router.trace import RequestTrace, chrome_trace


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Whether requests are served; `reasons` says what is wrong, also when merely degraded."""

    serving: bool
    status: str  # ok, degraded, draining, unhealthy
    reasons: tuple[str, ...] = ()
    workers: tuple[WorkerHealth, ...] = ()


Look = Callable[[float], Activity]
"""At what goes on, and at what ended after a time of the router's clock."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the doors tell about the server; each call is cheap and runs on the event loop."""

    health: Callable[[], HealthReport]
    render_metrics: Callable[[], bytes]
    workforce: Workforce | None = None
    admin_token: str | None = None  # of operators on other machines; None: there are none
    traces: Callable[[], Sequence[RequestTrace]] = tuple  # of the last requests
    look: Look | None = None  # at what goes on


class OperationRoutes:
    """The routes; `router` goes into the app."""

    def __init__(self, service: TextService, facts: ServerFacts) -> None:
        self._service = service
        self._facts = facts
        self.router = APIRouter(tags=["operations"])
        sick = json_answer(HEALTH, "Requests are not served.", 503)
        ids = object_of(count=COUNT, max_model_len=COUNT, tokens={"type": "array", "items": COUNT})
        traces = object_of(traceEvents={"type": "array", "items": {"type": "object"}})
        with_body = errors(*WITH_BODY)
        self._add("/health", self.health, json_answer(HEALTH) | sick)
        self._add("/version", self.version, json_answer(object_of(version=TEXT)) | errors(401))
        self._add("/metrics", self.metrics, text_answer(CONTENT_TYPE) | errors(401))
        self._add("/timeline", self.timeline, json_answer(traces) | errors(401))
        self._add("/tokenize", self.tokenize, json_answer(ids) | with_body, "POST")
        text = json_answer(object_of(prompt=TEXT))
        self._add("/detokenize", self.detokenize, text | with_body, "POST")

    def _add(
        self, path: str, endpoint: Callable[..., Any], responses: Responses, method: str = "GET"
    ) -> None:
        self.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            response_class=Response,
            responses=responses,
        )

    async def health(self) -> Response:
        """200 while requests are served, else 503; `reasons` says what is wrong, and where."""
        report = self._facts.health()
        workers = [asdict(worker) for worker in report.workers]
        hosts: dict[str, str] = {}  # a host is up with one of its workers
        for worker in report.workers:
            state = "down" if worker.state == "down" else "up"
            hosts[worker.host] = "up" if hosts.get(worker.host) == "up" else state
        body = {
            "status": report.status,
            "reasons": list(report.reasons),
            "hosts": hosts,
            "workers": workers,
        }
        return json_response(body, 200 if report.serving else 503)

    async def version(self) -> Response:
        """The version of jpd."""
        return json_response({"version": jpd_version()})

    async def metrics(self) -> Response:
        """Prometheus text."""
        return Response(self._facts.render_metrics(), headers={"content-type": CONTENT_TYPE})

    async def timeline(self) -> Response:
        """Phases of the last requests by worker, for chrome://tracing and ui.perfetto.dev."""
        requests = self._facts.traces()
        content = await asyncio.to_thread(lambda: json.dumps(chrome_trace(requests)))
        return Response(content, media_type="application/json")

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a text or of chat messages, as generation would make them."""
        self._service.model.check_name(body.model)
        check_extra_fields(body.model_extra, "/tokenize")
        tools = read_tools(body.tools)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", body.prompt, "give either prompt or messages")
        if body.prompt is not None:
            text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        else:
            messages = read_messages(body.messages)
            text = await self._service.chat_prompt(
                messages, body.add_generation_prompt is not False, tools
            )
            add_special_tokens = bool(body.add_special_tokens)
        tokens = await self._service.tokenize(text, add_special_tokens)
        max_model_len = self._service.model.max_model_len
        return json_response(
            {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        )

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of token ids, special tokens included."""
        self._service.model.check_name(body.model)
        check_extra_fields(body.model_extra, "/detokenize")
        return json_response({"prompt": await self._service.detokenize(body.tokens)})


def jpd_version() -> str:
    """The version of the installed distribution; "unknown" when run from a bare source tree."""
    try:
        return version("jpd")
    except PackageNotFoundError:
        return "unknown"

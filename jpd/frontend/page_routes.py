"""The page at / and the stream of what goes on that it draws.

1. The files in the folder `page` are read once; there is nothing to build and nothing to fetch from
elsewhere, and a policy in their headers forbids both.
2. `/activity` tells every quarter of a second what runs and what has ended since.

Knows no router, only a callable that looks at it. Mounted by `http_app`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

from jpd.frontend.api_page import errors, event_answer
from jpd.frontend.errors import RouteError
from jpd.frontend.operations import HealthReport, Look, ServerFacts
from jpd.frontend.prompts import ServedModel
from jpd.frontend.responses import EventStream
from jpd.frontend.service import TextService
from jpd.router.activity import Activity
from jpd.router.trace import RequestTrace

PERIOD_SECONDS = 0.25
FIRST_LOOK_SECONDS = 300.0
"""How far back the first event of a stream reaches."""
MAX_ENDED = 500
"""Requests in one event: the last ones that ended."""

PAGE_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class PageRoutes:
    """The routes; `router` goes into the app."""

    def __init__(self, service: TextService, facts: ServerFacts) -> None:
        self._service, self._facts = service, facts
        self._files = read_files()
        self.router = APIRouter(tags=["operations"])
        add = self.router.add_api_route
        add("/", self.page, methods=["GET"], response_model=None, include_in_schema=False)
        add(
            "/page/{name}", self.file, methods=["GET"], response_model=None, include_in_schema=False
        )
        add(
            "/activity",
            self.activity,
            methods=["GET"],
            response_model=None,
            response_class=Response,
            responses=event_answer("A look every quarter of a second.") | errors(401, 404),
        )

    async def page(self) -> Response:
        """The page itself."""
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        """One of its files."""
        content = self._files.get(name)
        if content is None:
            raise RouteError(404, f"the page has no file {name[:100]!r}")
        kind = PAGE_TYPES[name.rpartition(".")[2]]
        return Response(content, headers={**PAGE_HEADERS, "content-type": kind})

    async def activity(self) -> Response:
        """Server-sent events: workers, requests that run, and those that ended since the last."""
        look = self._facts.look
        if look is None:
            raise RouteError(404, "this server does not tell of its activity")
        return EventStream(self._events(look))

    async def _events(self, look: Look) -> AsyncGenerator[bytes, None]:
        """One look after the other, until the client goes away or the server drains."""
        seen = look(float("inf")).now - FIRST_LOOK_SECONDS
        while True:
            activity = look(seen)
            seen = activity.ended[-1].end if activity.ended else seen
            body = activity_body(activity, self._service.model, self._facts.health())
            yield f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode("ascii")
            if activity.is_draining:
                return  # a page that is open must not hold up the end of the server
            await asyncio.sleep(PERIOD_SECONDS)


def read_files() -> dict[str, bytes]:
    """The files of the page by their names."""
    folder = files("jpd.frontend") / "page"
    found = {item.name: item.read_bytes() for item in folder.iterdir()}
    return {name: data for name, data in found.items() if name.rpartition(".")[2] in PAGE_TYPES}


def activity_body(
    activity: Activity, model: ServedModel, health: HealthReport
) -> dict[str, object]:
    """What the page draws, as JSON; times are seconds of the router's clock."""
    tokenizer = model.tokenizer
    return {
        "now": activity.now,
        "model": {
            "name": model.name,
            "max_model_len": model.max_model_len,
            "reads_text": tokenizer is not None,
            "chats": tokenizer is not None and tokenizer.chat_template is not None,
        },
        "health": {"status": health.status, "reasons": health.reasons},
        "waiting": activity.num_waiting,
        "workers": [
            {
                "name": worker.name,
                "role": worker.role,
                "prefills": worker.num_prefills,
                "rows": worker.num_rows,
                "slots": worker.num_slots,
                "pages": worker.num_pages,
                "pages_used": worker.num_pages_used,
                "pages_cached": worker.num_pages_cached,
            }
            for worker in activity.workers
        ],
        "running": _requests(activity.running),
        "ended": _requests(activity.ended[-MAX_ENDED:]),
    }


def _requests(traces: Sequence[RequestTrace]) -> list[dict[str, object]]:
    return [
        {
            "id": trace.request_id,
            "state": trace.state.value,
            "prompt_tokens": trace.num_prompt_tokens,
            "output_tokens": trace.num_output_tokens,
            "end": trace.end,
            "ttft": trace.ttft_seconds,
            "tpot": trace.tpot_seconds,
            "spans": [
                [span.phase, span.worker, round(span.start, 4), round(span.end, 4)]
                for span in trace.spans
            ],
        }
        for trace in traces
    ]

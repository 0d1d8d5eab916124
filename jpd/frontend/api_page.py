"""What /openapi.json says of answers: their statuses, and what is in them.

Every status told here is one that its route gives, and errors all have one body. Used by the
routes and by `http_app`.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from jpd.frontend.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Responses = dict[int | str, dict[str, Any]]
Schema = dict[str, Any]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="the field that is wrong")
    code: str


class ErrorBody(BaseModel):
    """What every error looks like, whatever the status."""

    error: ErrorDetail


REASONS = {
    400: "A field breaks a rule: `param` names it.",
    401: "The server asks for an API key, and this is not it.",
    403: "Not from this machine, and without the operators' token.",
    404: "No such thing: `message` names it.",
    413: "The body is larger than the server takes.",
    429: "No room in time, or too many calls; `Retry-After` has seconds.",
    499: "The server ended the request, because it stops.",
    500: "A bug of the server; its log has it under the id of `X-Request-Id`.",
    503: "A worker was lost, or the server stops.",
    504: "The server's limit of time has passed.",
}
RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}

BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
WITH_BODY = (400, 401, 404, 413, 429)
GENERATION = (499, 500, 503, 504, *WITH_BODY)


def errors(*statuses: int) -> Responses:
    """The failures of a route."""
    found: Responses = {
        status: {"model": ErrorBody, "description": REASONS[status]} for status in sorted(statuses)
    }
    if 429 in found:
        found[429]["headers"] = RETRY_AFTER
    return found


def json_answer(schema: Schema, description: str = "As asked.", status: int = 200) -> Responses:
    """An answer in JSON."""
    content = {"application/json": {"schema": schema}}
    return {status: {"description": description, "content": content}}


def object_of(**properties: Schema) -> Schema:
    """An object that has all of these, and may have more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def generation_answer(choice: Schema) -> Responses:
    """Whole, or as events."""
    usage = {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}
    whole = object_of(
        id=TEXT,
        object=TEXT,
        created=COUNT,
        model=TEXT,
        choices={"type": "array", "items": choice},
        usage=object_of(**usage),
    )
    told = "Whole, or with `stream` as server-sent events: chunks as data, the last one [DONE]."
    found = json_answer(whole, told)
    found[200]["content"] |= EVENTS
    return found


EVENTS: Schema = {"text/event-stream": {}}
"""Without a schema: one would be of the whole body, or of each event, depending on who reads it."""

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}
_LOGPROBS: Schema = {"type": ["object", "null"]}
COMPLETION = generation_answer(
    object_of(index=COUNT, text=TEXT, logprobs=_LOGPROBS, finish_reason=_REASON)
)
CHAT = generation_answer(
    object_of(
        index=COUNT,
        message=object_of(role={"const": "assistant"}, content={"type": ["string", "null"]}),
        logprobs=_LOGPROBS,
        finish_reason=_REASON,
    )
)
MODEL = object_of(
    id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT
)
HEALTH = object_of(
    status={"enum": ["ok", "degraded", "draining", "unhealthy"]},
    reasons={"type": "array", "items": TEXT},
    hosts={"type": "object"},
    workers={"type": "array", "items": {"type": "object"}},
)


def text_answer(media_type: str) -> Responses:
    """An answer that is no JSON."""
    return {200: {"description": "As asked.", "content": {media_type: {"schema": TEXT}}}}


def event_answer(description: str) -> Responses:
    """Server-sent events alone."""
    return {200: {"description": description, "content": EVENTS}}


def page_of(app: FastAPI) -> Callable[[], Schema]:
    """The document: FastAPI's, but for what is not true of this app.

    It adds the status 422, which no route gives, and writes bounds as floats, which do not hold
    those of a seed.
    """

    def build() -> Schema:
        if app.openapi_schema is None:
            schema = FastAPI.openapi(app)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = schema["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            for body in BODIES:
                exact = body.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas[body.__name__]["properties"] = exact["properties"]
        return FastAPI.openapi(app)  # it remembers its document

    return build

"""Puts the HTTP app together: routes, border, and one shape for every error.

Knows FastAPI; the routes are elsewhere. Called by `server` and by the tests.
"""

from functools import partial

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from jpd.errors import JpdError, RequestError
from jpd.frontend.admin import AdminRoutes
from jpd.frontend.api_page import page_of
from jpd.frontend.border import DEFAULT_MAX_CALLS, Border
from jpd.frontend.door_security import NO_SECURITY, DoorSecurity
from jpd.frontend.errors import RouteError, describe
from jpd.frontend.openai_http import GENERATION_PATHS, OpenAiRoutes
from jpd.frontend.operations import OperationRoutes, ServerFacts, jpd_version
from jpd.frontend.page_routes import PageRoutes
from jpd.frontend.responses import failure_response
from jpd.frontend.service import TextService

DEFAULT_MAX_BODY_BYTES = 16 << 20


def create_app(
    service: TextService,
    facts: ServerFacts,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    security: DoorSecurity = NO_SECURITY,
    max_calls: int = DEFAULT_MAX_CALLS,
) -> FastAPI:
    """The whole HTTP app; it must run on the event loop of the service's router."""
    app = FastAPI(
        title="jpd",
        version=jpd_version(),
        description="OpenAI's completions and chat completions, and what an operator needs.",
    )
    # Documents the key; the border is who asks for it.
    shown = [] if security.api_key is None else [Depends(HTTPBearer(auto_error=False))]
    app.include_router(OpenAiRoutes(service).router, dependencies=shown)
    app.include_router(OperationRoutes(service, facts).router, dependencies=shown)
    app.include_router(PageRoutes(service, facts).router, dependencies=shown)
    if facts.workforce is not None:
        app.include_router(AdminRoutes(facts.workforce, facts.admin_token).router)
    app.openapi = page_of(app)  # type: ignore[method-assign]  # FastAPI's way to change it
    app.add_middleware(
        Border, max_body_bytes=max_body_bytes, security=security, max_calls=max_calls
    )
    app.add_exception_handler(JpdError, _on_error)
    app.add_exception_handler(RequestValidationError, partial(_on_invalid, service))
    app.add_exception_handler(HTTPException, _on_http_error)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return failure_response(describe(error, request.scope["jpd_request_id"]))


async def _on_invalid(service: TextService, request: Request, error: Exception) -> Response:
    """A body that is none of ours: refused before its route is called."""
    assert isinstance(error, RequestValidationError)
    if request.url.path in GENERATION_PATHS:
        service.count_refusal()
    return await _on_error(request, _first_fault(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Errors of the framework itself: no route, wrong method, a body that cannot be read."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, JpdError):
        return await _on_error(request, error.__cause__)
    if error.status_code == 400:
        return await _on_error(request, RequestError("body", None, str(error.detail)))
    message = f"{error.detail}: {request.method} {request.url.path[:100]}"
    failure = describe(RouteError(error.status_code, message), request.scope["jpd_request_id"])
    return failure_response(failure, error.headers)


def _first_fault(error: RequestValidationError) -> RequestError:
    """The first of pydantic's findings in our words."""
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        reason = fault.get("ctx", {}).get("error", "")
        return RequestError("body", f"character {fault['loc'][-1]}", f"is not valid JSON: {reason}")
    field = ".".join(str(part) for part in fault["loc"][1:])
    if not field:
        return RequestError("body", None, "must be a JSON object, sent as application/json")
    value = None if fault["type"] == "missing" else fault.get("input")
    rule = str(fault["msg"])
    return RequestError(field, value, rule[:1].lower() + rule[1:])

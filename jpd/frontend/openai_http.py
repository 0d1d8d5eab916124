"""The OpenAI HTTP API: models, completions, chat completions.

1. A body becomes a GenerateJob; all that is wrong with it is a 400 before any header is sent.
2. The first delta is awaited before the headers too, so that "no room" is a 429 and not a stream.
3. Then the answer is whole JSON, or SSE that ends with [DONE] whatever happens.

Knows TextService, not the router. Runs on the router's event loop. Mounted by `http_app`.
"""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from jpd.errors import RequestError
from jpd.frontend.answers import (
    DONE_EVENT,
    AnswerKind,
    AnswerOptions,
    ChunkWriter,
    error_event,
    whole_answer,
)
from jpd.frontend.api_page import (
    CHAT,
    COMPLETION,
    GENERATION,
    MODEL,
    Responses,
    errors,
    json_answer,
    object_of,
)
from jpd.frontend.errors import describe
from jpd.frontend.job import GenerateJob, PreparedJob, read_sampling
from jpd.frontend.messages import read_messages
from jpd.frontend.prompts import Prompt, read_prompts
from jpd.frontend.refusals import check_extra_fields, check_stream_options
from jpd.frontend.responses import EventStream, json_response
from jpd.frontend.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from jpd.frontend.service import TextDelta, TextService
from jpd.frontend.spans import read_trace_context
from jpd.frontend.token_texts import TokenTexts
from jpd.frontend.tool_fields import ToolRequest, read_tool_request, with_grammar
from jpd.request import SamplingParams

logger = logging.getLogger("jpd.http")

DEFAULT_COMPLETION_TOKENS = 16
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")


class OpenAiRoutes:
    """The routes; `router` goes into the app."""

    def __init__(self, service: TextService) -> None:
        self._service = service
        self._created = int(time.time())
        self.router = APIRouter(tags=["openai"])
        models = object_of(object={"const": "list"}, data={"type": "array", "items": MODEL})
        get, post = partial(self._add, "GET"), partial(self._add, "POST")
        get("/v1/models", self.models, json_answer(models) | errors(401))
        get("/v1/models/{name:path}", self.model, json_answer(MODEL) | errors(401, 404))
        post("/v1/completions", self.completions, COMPLETION | errors(*GENERATION))
        post("/v1/chat/completions", self.chat, CHAT | errors(*GENERATION))

    def _add(
        self, method: str, path: str, endpoint: Callable[..., Any], responses: Responses
    ) -> None:
        self.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            response_class=Response,
            responses=responses,
        )

    async def models(self) -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """One model by its name."""
        self._service.model.check_name(name)
        return json_response(self._model_card())

    async def completions(
        self,
        request: Request,
        body: CompletionBody,
        x_session_id: str | None = Header(None),
    ) -> Response:
        """Continue prompts of text or of token ids."""
        arrival_time = time.monotonic()
        with self._service.counting_refusals():
            self._check_body(body, "/v1/completions")
            fields = {"max_tokens": DEFAULT_COMPLETION_TOKENS} | body.sampling_fields()
            prompts = read_prompts(body.prompt)
            sampling = read_sampling(fields, self._service.model.default_sampling)
            job = _job(request, body, sampling, prompts, x_session_id, arrival_time)
            prepared = await self._service.prepare(job)
        return await self._answer(request, body, "completion", prepared)

    async def chat(
        self,
        request: Request,
        body: ChatBody,
        x_session_id: str | None = Header(None),
    ) -> Response:
        """Continue a conversation, through the model's chat template."""
        arrival_time = time.monotonic()
        with self._service.counting_refusals(), _blaming_the_field_given(body):
            self._check_body(body, "/v1/chat/completions")
            fields = body.sampling_fields()
            model = self._service.model
            tools = read_tool_request(body.tools, body.tool_choice, body.parallel_tool_calls, model)
            prompt = await self._service.chat_prompt(
                read_messages(body.messages),
                body.add_generation_prompt is not False,
                () if tools is None else tools.tools,
            )
            sampling = with_grammar(read_sampling(fields, model.default_sampling), tools)
            job = _job(request, body, sampling, (prompt,), x_session_id, arrival_time, tools)
            prepared = await self._service.prepare(job)
        return await self._answer(request, body, "chat", prepared)

    async def _answer(
        self, request: Request, body: GenerationBody, kind: AnswerKind, prepared: PreparedJob
    ) -> Response:
        model = self._service.model
        stream_options = body.stream_options
        options = AnswerOptions(
            kind=kind,
            request_id=request.scope["jpd_request_id"],
            model=model.name,
            include_usage=bool(stream_options and stream_options.include_usage),
            include_details=bool(body.include_details),
            include_token_ids=bool(body.return_token_ids) or model.tokenizer is None,
            num_logprobs=prepared.job.sampling.logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            token_texts=TokenTexts(model.tokenizer, bool(body.return_tokens_as_token_ids)),
        )
        if not body.stream:
            generations = await self._service.collect(prepared)
            return json_response(whole_answer(options, prepared, generations))
        deltas = self._service.stream(prepared)
        first = await anext(deltas)
        return EventStream(_events(options, prepared, first, deltas))

    def _check_body(self, body: GenerationBody, path: str) -> None:
        self._service.model.check_name(body.model)
        check_extra_fields(body.model_extra, path)
        if body.stream_options is not None:
            if not body.stream:
                raise RequestError("stream_options", "given", "needs stream = true")
            check_stream_options(body.stream_options.model_extra)

    def _model_card(self) -> dict[str, object]:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jpd",
            "max_model_len": model.max_model_len,
        }


@contextlib.contextmanager
def _blaming_the_field_given(body: ChatBody) -> Iterator[None]:
    """max_completion_tokens is read as max_tokens; what is wrong with it is told by its name."""
    try:
        yield
    except RequestError as error:
        if error.field != "max_tokens" or body.max_tokens is not None:
            raise
        raise RequestError("max_completion_tokens", error.value, error.rule) from None


def _job(
    request: Request,
    body: GenerationBody,
    sampling: SamplingParams,
    prompts: tuple[Prompt, ...],
    session_header: str | None,
    arrival_time: float,
    tools: ToolRequest | None = None,
) -> GenerateJob:
    session_id = body.session_id if body.session_id is not None else session_header
    if session_header is not None and session_id != session_header:
        raise RequestError("session_id", session_id, "differs from the header X-Session-Id")
    is_completion = isinstance(body, CompletionBody)
    add_special_tokens = body.add_special_tokens
    return GenerateJob(
        prompts=prompts,
        sampling=sampling,
        n=1 if body.n is None else body.n,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        # Calls are found by marks that are special tokens of some models.
        skip_special_tokens=body.skip_special_tokens is not False and tools is None,
        add_special_tokens=is_completion if add_special_tokens is None else add_special_tokens,
        session_id=session_id,
        cache_salt=body.cache_salt,
        prefill_worker=body.prefill_worker,
        decode_worker=body.decode_worker,
        priority=body.priority or 0,
        slo=body.slo,
        arrival_time=arrival_time,
        request_id=request.scope["jpd_request_id"],
        tools=None if tools is None else tools.use,
        trace_context=read_trace_context(request.headers.get),
    )


async def _events(
    options: AnswerOptions,
    prepared: PreparedJob,
    first: TextDelta,
    rest: AsyncGenerator[TextDelta, None],
) -> AsyncGenerator[bytes, None]:
    """The SSE bytes of one answer. An error becomes one event; [DONE] always comes last."""
    writer = ChunkWriter(options, prepared)
    try:
        async with aclosing(rest):
            chunk = writer.write(first)
            if chunk:
                yield chunk
            async for delta in rest:
                chunk = writer.write(delta)
                if chunk:
                    yield chunk
        end = writer.usage()
    except Exception as error:
        failure = describe(error, options.request_id)
        unknown = error if failure.http_status == 500 else None
        logger.error("request %s failed: %r", options.request_id, error, exc_info=unknown)
        end = error_event(failure)
    yield end + DONE_EVENT

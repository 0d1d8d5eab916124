"""The methods of jpd.v1.Jpd.

Cancelling an RPC, or its deadline, cancels the handler's task, which closes the stream of deltas
and so the router's request. Knows TextService, not the router. Served by `grpc_server`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from jpd.frontend.grpc_calls import (
    MAX_TIMELINE_TRAILERS,
    Context,
    Trailers,
    abort,
    answer,
    begin_call,
    codec,
    parsed,
)
from jpd.frontend.grpc_chat import ChatCall
from jpd.frontend.grpc_messages import (
    answer_messages,
    begins_answer,
    model_info,
    read_chat,
    read_chat_tools,
    read_job,
    timeline_trailer,
)
from jpd.frontend.service import TextService
from jpd.rpc import jpd_pb2

SERVICE_NAME = "jpd.v1.Jpd"


class JpdServicer:
    """A request that could not be parsed arrives as None. Chats end once `stopping` is set."""

    def __init__(self, service: TextService, stopping: asyncio.Event) -> None:
        self._service = service
        self._stopping = stopping

    def handler(self) -> Any:
        """All methods, as grpc's server takes them."""
        stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        chat = grpc.stream_stream_rpc_method_handler
        methods = {
            "Generate": stream(self.generate, *codec(jpd_pb2.GenerateRequest)),
            "Chat": chat(self.chat, *codec(jpd_pb2.ChatRequest)),
            "Tokenize": unary(self.tokenize, *codec(jpd_pb2.TokenizeRequest)),
            "Detokenize": unary(self.detokenize, *codec(jpd_pb2.DetokenizeRequest)),
            "GetModelInfo": unary(self.get_model_info, *codec(jpd_pb2.GetModelInfoRequest)),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def generate(
        self, request: jpd_pb2.GenerateRequest | None, context: Context
    ) -> AsyncGenerator[jpd_pb2.GenerateResponse, None]:
        """Deltas as they come; the last message has the usage, the trailers the timelines."""
        request_id = begin_call(context, "Generate")
        trailers: Trailers = [("jpd-request-id", request_id)]
        try:
            async with aclosing(
                self._messages(parsed(request), context, request_id, trailers)
            ) as messages:
                async for message in messages:
                    yield message
            context.set_trailing_metadata(trailers)
        except Exception as error:
            await abort(context, error, request_id, trailers)

    async def _messages(
        self,
        request: jpd_pb2.GenerateRequest,
        context: Context,
        request_id: str,
        trailers: Trailers,
    ) -> AsyncGenerator[jpd_pb2.GenerateResponse, None]:
        """Appends to `trailers` as choices end."""
        with self._service.counting_refusals():
            job = await read_job(request, self._service, context)
            prepared = await self._service.prepare(replace(job, request_id=request_id))
        answers = answer_messages(self._service, prepared, request.include_details)
        async with aclosing(answers) as pairs:
            async for delta, message in pairs:
                if delta.timeline is not None and len(trailers) <= MAX_TIMELINE_TRAILERS:
                    trailer = timeline_trailer(delta.index, delta.timeline)
                    trailers.append(("jpd-timeline", trailer))
                yield message

    async def chat(self, requests: object, context: Context) -> None:
        """Turns of one conversation."""
        await ChatCall(self._service, context, self._stopping).run()

    async def tokenize(
        self, request: jpd_pb2.TokenizeRequest | None, context: Context
    ) -> jpd_pb2.TokenizeResponse:
        return await answer(context, "Tokenize", lambda: self._tokenize(parsed(request)))

    async def _tokenize(self, request: jpd_pb2.TokenizeRequest) -> jpd_pb2.TokenizeResponse:
        is_chat = request.WhichOneof("prompt") == "chat"
        text = request.text
        if is_chat:
            text = await self._service.chat_prompt(
                read_chat(request.chat),
                add_generation_prompt=begins_answer(request.chat),
                tools=read_chat_tools(request.chat),
            )
        add_special_tokens = not is_chat
        if request.HasField("add_special_tokens"):
            add_special_tokens = request.add_special_tokens
        token_ids = await self._service.tokenize(text, add_special_tokens)
        return jpd_pb2.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: jpd_pb2.DetokenizeRequest | None, context: Context
    ) -> jpd_pb2.DetokenizeResponse:
        return await answer(context, "Detokenize", lambda: self._detokenize(parsed(request)))

    async def _detokenize(self, request: jpd_pb2.DetokenizeRequest) -> jpd_pb2.DetokenizeResponse:
        text = await self._service.detokenize(tuple(request.token_ids), "token_ids")
        return jpd_pb2.DetokenizeResponse(text=text)

    async def get_model_info(
        self, request: jpd_pb2.GetModelInfoRequest | None, context: Context
    ) -> jpd_pb2.ModelInfo:
        begin_call(context, "GetModelInfo")
        return model_info(self._service.model)

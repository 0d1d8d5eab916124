"""Requests through the Python API of a server of this process: tokens are counted exactly.

What a server says of a request comes with it: the seconds of its phases and the KV it moved. Called
by the benchmark `compare`.
"""

import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Protocol

from jpd.bench.open_loop import Part, SendError
from jpd.bench.workloads import PlannedRequest
from jpd.config import DeploymentConfig
from jpd.errors import JpdError
from jpd.request import Timeline


class Delta(Protocol):
    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def timeline(self) -> Timeline | None: ...


class Streams(Protocol):
    """What is needed of `jpd.api.Server`."""

    def astream(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        ignore_eos: bool,
        session_id: str | None,
    ) -> AsyncGenerator[Delta, None]: ...


class Running(Protocol):
    """A server to be used in `with`."""

    def __enter__(self) -> Streams: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None: ...


Launch = Callable[[DeploymentConfig], Running]


class ApiSender:
    """A Sender."""

    def __init__(self, server: Streams) -> None:
        self._server = server

    async def send(self, request: PlannedRequest) -> AsyncGenerator[Part, None]:
        stream = self._server.astream(
            request.token_ids,
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            session_id=request.session_id,
        )
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    yield Part(len(delta.token_ids), details=numbers_of(delta.timeline))
        except JpdError as error:
            raise SendError(str(error)) from error


def numbers_of(timeline: Timeline | None) -> dict[str, float]:
    """The timeline's numbers by their names."""
    if timeline is None:
        return {}
    values = dataclasses.asdict(timeline)
    return {name: float(value) for name, value in values.items() if type(value) in (int, float)}

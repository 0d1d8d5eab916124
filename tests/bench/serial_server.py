"""A server without a model whose times are known: it prefills one prompt at a time.

A Sender, for tests in virtual time.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from jpd.bench.open_loop import Part, SendError
from jpd.bench.workloads import PlannedRequest


class SerialServer:
    """A prompt takes `prefill_seconds` alone, each further token `step_seconds`, however many.

    Where it `shares`, no token comes while a prompt is prefilled.
    """

    def __init__(
        self,
        prefill_seconds: float,
        step_seconds: float,
        *,
        fails_at: int = -1,
        shares: bool = False,
        details: Mapping[str, float] | None = None,
    ) -> None:
        self.prefill_seconds, self.step_seconds = prefill_seconds, step_seconds
        self.sent: list[PlannedRequest] = []
        self._lock, self._fails_at, self._shares = asyncio.Lock(), fails_at, shares
        self._details = details or {}

    async def send(self, request: PlannedRequest) -> AsyncGenerator[Part, None]:
        number = len(self.sent)
        self.sent.append(request)
        if number == self._fails_at:
            raise SendError("HTTP 503: no room")
        async with self._lock:
            await asyncio.sleep(self.prefill_seconds)
        yield Part(1)
        for _ in range(request.max_tokens - 1):
            await asyncio.sleep(self.step_seconds)
            if self._shares:
                async with self._lock:
                    pass
            yield Part(1)
        yield Part(num_prompt_tokens=7, num_output_tokens=request.max_tokens, details=self._details)

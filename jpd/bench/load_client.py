"""Requests over HTTP to any server with OpenAI's /v1/completions, answered as streams.

Prompts are token ids and outputs have their full length, as most servers can; with `is_plain` only
fields of OpenAI's own API are sent and a prompt is text, one short word for each token. Tokens are
those that the server counts in `usage`; where it does not, a chunk with text is one. Needs httpx.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from jpd.bench.open_loop import Part, SendError
from jpd.bench.workloads import PlannedRequest
from jpd.errors import ConfigError, Problem

WORDS = (
    "time way year day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side "
    "kind head house service friend father power hour game line end member law car city name team"
).split()
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What /v1/models says: jpd and vLLM tell the length, others may not."""

    name: str
    max_len: int | None


class HttpSender:
    """A Sender, to be used in `async with`."""

    def __init__(
        self, url: str, *, model: str = "", api_key: str | None = None, is_plain: bool = False
    ) -> None:
        """`url` as far as before /v1. Raises ConfigError without httpx."""
        try:
            import httpx
        except ImportError as error:
            rule = "the load generator needs the extra: pip install 'jpd[bench]'"
            raise ConfigError([Problem("jpd bench", "httpx", "missing", rule)]) from error
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self._url, self._model, self._is_plain = url, model, is_plain
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def find_model(self) -> ServedModel:
        """The model that was named, or the first; it is asked from then on. Raises ConfigError."""
        try:
            response = await self._client.get("/v1/models")
            response.raise_for_status()
            served = {str(model["id"]): model for model in response.json()["data"]}
        except (*self._errors, ValueError, KeyError, TypeError) as error:
            rule = f"must be an OpenAI-compatible server: {error!r}"
            raise ConfigError([Problem("jpd bench", "--url", self._url, rule)]) from error
        name = self._model or next(iter(served), "")
        if name not in served:
            rule = f"the server has {', '.join(served) or 'none'}"
            raise ConfigError([Problem("jpd bench", "--served-model", name, rule)])
        self._model = name
        max_len = served[name].get("max_model_len")
        return ServedModel(name, max_len if isinstance(max_len, int) else None)

    async def send(self, request: PlannedRequest) -> AsyncGenerator[Part, None]:
        try:
            async with self._client.stream(
                "POST", "/v1/completions", json=self.body(request)
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise SendError(f"HTTP {response.status_code}: {text[:200]}")
                async for line in response.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield read_event(line[5:])
        except self._errors as error:
            raise SendError(repr(error)) from error

    def body(self, request: PlannedRequest) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._is_plain:
            words = [WORDS[token % len(WORDS)] for token in request.token_ids]
            return body | {"prompt": " ".join(words)}
        body["ignore_eos"] = True
        if request.session_id is not None:
            body["session_id"] = request.session_id
        return body


def read_event(text: str) -> Part:
    """One event of the stream. Raises SendError for what is none."""
    try:
        event: Mapping[str, Any] = json.loads(text)
        if event.get("error"):
            raise SendError(str(event["error"]))
        usage = event.get("usage") or {}
        num_tokens = sum(bool(choice.get("text")) for choice in event.get("choices", ()))
        return Part(num_tokens, usage.get("prompt_tokens"), usage.get("completion_tokens"))
    except (ValueError, AttributeError, TypeError) as error:
        raise SendError(f"no event of a completion: {text[:200]}") from error

"""A generation request, its life and what comes out of it.

Knows token ids and numbers only: no text, no devices, no transport. Built by the frontends, driven
by the router, read by everybody.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Literal

from jpd.errors import RequestError
from jpd.grammar import Grammar

FinishReason = Literal["stop", "length"]

MAX_STOP_TOKEN_IDS = 16
"""Rows of the decode batch carry their stop token ids on the device in an array of this width."""

MAX_TOP_K = 1 << 30
MAX_TOKENS = 1 << 31


class RequestState(enum.Enum):
    """Life of a request. Leaving a state releases what the state held."""

    WAITING = "waiting"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


def _check_number(name: str, value: object, low: float, high: float, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(name, value, f"must be a finite number, {rule}")
    if not low <= value <= high:
        raise RequestError(name, value, f"must be {rule}")


def _check_int(name: str, value: object, low: int, high: int, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, value, f"must be an integer, {rule}")
    if not low <= value <= high:
        raise RequestError(name, value, f"must be {rule}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    temperature 0 is greedy. top_k 0 and top_p 1 switch those filters off. The random key of the
    token at sequence position i is fold_in(key(seed), i), so that a seeded answer does not depend
    on batch mates. Raises RequestError naming the field, the value and the rule.
    """

    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the router, a new one for each request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None  # what the answer must match

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS, f"between 1 and {MAX_TOKENS}")
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS, f"between 0 and {MAX_TOKENS}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            rule = f"must not exceed max_tokens = {self.max_tokens}"
            raise RequestError("min_tokens", self.min_tokens, rule)
        _check_number("temperature", self.temperature, 0.0, 100.0, "between 0 and 100")
        _check_number("top_p", self.top_p, 1e-6, 1.0, "above 0 and at most 1")
        _check_int("top_k", self.top_k, 0, MAX_TOP_K, f"between 0 (off) and {MAX_TOP_K}")
        _check_number("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        if self.seed is not None:
            _check_int("seed", self.seed, -(1 << 63), (1 << 63) - 1, "a 64-bit integer")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise RequestError("stop", stop, "must be a non-empty string")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                "stop_token_ids", self.stop_token_ids, f"at most {MAX_STOP_TOKEN_IDS} ids"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, validated and tokenised; times are seconds of `time.monotonic`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    deadline: float
    eos_token_ids: tuple[int, ...] = ()
    session_id: str | None = None
    priority: int = 0
    slo: str | None = None
    cache_salt: str | None = None  # prefixes are shared only among requests of the same salt
    prefill_worker: str | None = None  # must be this one; None: the router chooses
    decode_worker: str | None = None
    disaggregate: bool | None = (
        None  # True, False: forced (benchmarks, verify); None: the router chooses
    )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(slots=True)
class Timeline:
    """Where the time of one request went (seconds) and what it cost; filled as phases end."""

    queue_seconds: float = 0.0  # arrival → reservation held
    prefill_seconds: float = 0.0  # reservation → first token sampled
    transfer_seconds: float = 0.0  # first token sampled → last KV page on the decode worker
    decode_seconds: float = 0.0  # KV complete → last token
    ttft_seconds: float = 0.0  # arrival → first token handed to the frontend
    tpot_seconds: float = 0.0  # (last token − first token) / (output tokens − 1)
    kv_bytes: int = 0  # moved between meshes
    num_cached_tokens: int = 0  # prompt tokens not computed, thanks to the prefix cache
    num_retries: int = 0
    num_replayed_tokens: int = 0  # tokens prefilled again because a worker was lost
    prefill_worker: str = ""
    decode_worker: str = ""
    path: list[str] = field(default_factory=list)  # e.g. ["disaggregated", "retry_other_prefill"]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One event of a request's stream: new tokens, and on the last event why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    timeline: Timeline | None = None  # set with finish_reason

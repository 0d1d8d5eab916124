"""A generation request, its life and what comes out of it.

Knows token ids and numbers only: no text, no devices, no transport. Built by the frontends, driven
by the router, read by everybody.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jpd.errors import RequestError
from jpd.grammar import Grammar

FinishReason = Literal["stop", "length"]

MAX_STOP_TOKEN_IDS = 16
"""Rows of the decode batch carry their stop token ids on the device in an array of this width."""

MAX_SPECULATIVE_TOKENS = 16
"""More are hardly ever right, and all of them are computed."""

MAX_TOP_K = 1 << 30
MAX_TOKENS = 1 << 31

MAX_LOGIT_BIASES = 300
MAX_TOP_LOGPROBS = 20
"""Both are widths of arrays on the device, so that no request needs a compilation."""

LEAST_LOGPROB = -9999.0
"""What stands for log-probabilities below it: minus infinity is no number in JSON."""


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
    """How the tokens of one request are chosen, and what is told of them.

    Logits get their bias, then the penalties (repetition over prompt and output, frequency and
    presence over the output), then min_tokens bars the stop ids; temperature, min_p, top_k and
    top_p follow. temperature 0 is greedy. top_k 0 and top_p 1 switch those filters off. The random
    key of the token at sequence position i is fold_in(key(seed), i), so that a seeded answer does
    not depend on batch mates. logprobs are those of the model's own logits, before all of this: 0
    asks for the token's own, n for the n best beside it. Raises RequestError naming the field, the
    value and the rule.
    """

    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    seed: int | None = None  # None: drawn by the router, a new one for each request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None  # what the answer must match
    num_speculative_tokens: int = 0  # drafts verified in a step; the same tokens, sooner
    logprobs: int | None = None  # None: none
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_filters()
        self._check_penalties()
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                rule = f"between 0 and {MAX_TOP_LOGPROBS}"
                _check_int(name, value, 0, MAX_TOP_LOGPROBS, rule)
        if self.seed is not None:
            _check_int("seed", self.seed, -(1 << 63), (1 << 63) - 1, "a 64-bit integer")
        rule = f"between 0 (off) and {MAX_SPECULATIVE_TOKENS}"
        speculative = self.num_speculative_tokens
        _check_int("num_speculative_tokens", speculative, 0, MAX_SPECULATIVE_TOKENS, rule)
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise RequestError("stop", stop, "must be a non-empty string")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                "stop_token_ids", self.stop_token_ids, f"at most {MAX_STOP_TOKEN_IDS} ids"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far must be known to choose the next one."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS, f"between 1 and {MAX_TOKENS}")
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS, f"between 0 and {MAX_TOKENS}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            rule = f"must not exceed max_tokens = {self.max_tokens}"
            raise RequestError("min_tokens", self.min_tokens, rule)

    def _check_filters(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0, "between 0 and 100")
        _check_number("top_p", self.top_p, 1e-6, 1.0, "above 0 and at most 1")
        _check_int("top_k", self.top_k, 0, MAX_TOP_K, f"between 0 (off) and {MAX_TOP_K}")
        _check_number("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")

    def _check_penalties(self) -> None:
        rule = "between 0.01 and 100; 1 is off"
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, rule)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0, "between -2 and 2")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            rule = f"at most {MAX_LOGIT_BIASES} entries"
            raise RequestError("logit_bias", f"{len(self.logit_bias)} entries", rule)
        for token_id, bias in self.logit_bias:
            _check_int("logit_bias", token_id, 0, MAX_TOKENS, "a token id")
            rule = f"between -100 and 100, for token {token_id}"
            _check_number("logit_bias", bias, -100.0, 100.0, rule)


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
    trace_context: Mapping[str, str] = field(default_factory=dict)  # W3C's, of the caller's span

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
    kv_bytes: int = 0  # moved to the decode worker
    sent_back_kv_bytes: int = 0  # moved from it before: a prefix that only it had
    num_cached_tokens: int = 0  # prompt tokens not computed, thanks to the prefix cache
    num_retries: int = 0
    num_replayed_tokens: int = 0  # prefilled again after a preemption or a lost worker
    num_draft_tokens: int = 0  # of speculative decoding, verified
    num_accepted_tokens: int = 0  # of these, right: each saved a step
    prefill_worker: str = ""
    decode_worker: str = ""
    path: list[str] = field(default_factory=list)  # e.g. ["disaggregated", "retry_other_prefill"]
    cost_ms: dict[str, float] = field(default_factory=dict)  # why these workers: jpd.router.cost
    session_kv: str = ""  # of a session: new, kept on decode, moved there again, or dropped


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model itself thought of the token at one position. Natural logarithms.

    The best tokens come in order; the token itself is among them if its rank is.
    """

    logprob: float  # LEAST_LOGPROB at least
    rank: int  # 1: the model's best
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


PromptLogprobs = tuple[TokenLogprobs | None, ...]
"""One for each token of a prompt; None for the first, which nothing stands before."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One event of a request's stream: new tokens, and on the last event why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    timeline: Timeline | None = None  # set with finish_reason
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for
    prompt_logprobs: PromptLogprobs = ()  # on the first event, if they were asked for

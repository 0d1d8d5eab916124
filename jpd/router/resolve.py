"""What the router checks and fills in before a request may wait for anything.

Raises RequestError at once for what can never be served; every open choice (length, seed, stop
ids, priority) is made here and nowhere else. Knows capacities, no load. Called by
`jpd.router.router`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jpd.config import SloConfig
from jpd.errors import RequestError
from jpd.request import MAX_STOP_TOKEN_IDS, Request, SamplingParams
from jpd.router.policy import Fleet
from jpd.router.record import ResolvedRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a sequence, in true lengths: never padded ones."""

    max_model_len: int  # prompt + output
    page_size: int
    vocab_size: int | None = None  # None: whoever made the ids has checked them
    short_context: int | None = None  # longrope: longer sequences have KV of another kind

    def context(self, fleet: Fleet) -> int:
        """Tokens of the longest sequence that the model and the largest decode pool can hold."""
        pools = [view.num_pages * self.page_size for view in fleet if view.decodes]
        return min(self.max_model_len, max(pools, default=self.max_model_len))


def resolve(
    request: Request,
    limits: Limits,
    fleet: Fleet,
    slos: Mapping[str, SloConfig],
    draw_seed: Callable[[], int],
) -> ResolvedRequest:
    """The request with every choice made. Raises RequestError."""
    _check_prompt(request.prompt_token_ids, limits.vocab_size)
    _check_path(request.disaggregate, fleet)
    _check_pins(request, fleet)
    slo = _slo(request, slos)
    seed = request.sampling.seed
    max_tokens = _resolve_max_tokens(request, limits.context(fleet))
    num_tokens = request.num_prompt_tokens + max_tokens
    priority = request.priority or (slo.priority if slo is not None else 0)
    return ResolvedRequest(
        request=replace(request, cache_salt=_cache_salt(request, num_tokens, limits.short_context)),
        sampling=replace(
            request.sampling,
            max_tokens=max_tokens,
            seed=draw_seed() if seed is None else seed,
        ),
        stop_token_ids=_stop_token_ids(request.sampling, request.eos_token_ids),
        priority=priority,
        highest_priority=max([priority, *(known.priority for known in slos.values())]),
        slo=slo,
    )


def _check_prompt(token_ids: Sequence[int], vocab_size: int | None) -> None:
    if not token_ids:
        raise RequestError("prompt", token_ids, "must have at least one token")
    if vocab_size is not None and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError("prompt", wrong, f"token ids must be between 0 and {vocab_size - 1}")


def _check_path(disaggregate: bool | None, fleet: Fleet) -> None:
    """A forced path must exist in this fleet, whoever is up at the moment."""
    if disaggregate is True:
        decoders = {view.name for view in fleet if view.decodes}
        senders = {view.name for view in fleet if view.role in ("prefill", "colocated")}
        if not any(decoders - {sender} for sender in senders):
            raise RequestError("disaggregate", True, "this fleet has no separate prefill worker")
    if disaggregate is False and not any(view.decodes and view.can_prefill for view in fleet):
        raise RequestError("disaggregate", False, "no decode worker of this fleet can prefill")


def _check_pins(request: Request, fleet: Fleet) -> None:
    """A pinned worker must be one of this fleet that can do its part, up or not."""
    able = {
        "decode_worker": [view.name for view in fleet if view.decodes],
        "prefill_worker": [
            view.name
            for view in fleet
            if view.role == "prefill"
            or (view.can_prefill and view.name == request.decode_worker)
            or view.role == "colocated"
        ],
    }
    for field, names in able.items():
        pinned = getattr(request, field)
        if pinned is not None and pinned not in names:
            part = field.removesuffix("_worker")
            known = ", ".join(names) or "none"
            raise RequestError(field, pinned, f"must be a worker that can {part}: {known}")


def _resolve_max_tokens(request: Request, context: int) -> int:
    """What was asked for, or the rest of the context; at least one token must fit."""
    num_left = context - request.num_prompt_tokens
    if num_left < 1:
        rule = f"must leave room for one output token in a context of {context} tokens"
        raise RequestError("prompt", f"{request.num_prompt_tokens} tokens", rule)
    asked = request.sampling.max_tokens
    if asked is None:
        return num_left
    if asked > num_left:
        rule = (
            f"{request.num_prompt_tokens} prompt tokens leave {num_left} of a context of {context}"
        )
        raise RequestError("max_tokens", asked, rule)
    return asked


def _cache_salt(request: Request, num_tokens: int, short_context: int | None) -> str | None:
    """Longrope turns a sequence that may exceed the short context by other factors, all of it.

    So its prefixes are of no use to shorter ones, nor theirs to it.
    """
    if short_context is None:
        return request.cache_salt
    kind = "long" if num_tokens > short_context else "short"
    return f"{kind}:{request.cache_salt or ''}"


def _stop_token_ids(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The model's end tokens, unless they are ignored, and the request's own, which never are."""
    eos = () if sampling.ignore_eos else tuple(eos_token_ids)
    token_ids = tuple(dict.fromkeys(eos + sampling.stop_token_ids))
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        rule = f"at most {MAX_STOP_TOKEN_IDS} ids, the model's {len(eos)} end tokens included"
        raise RequestError("stop_token_ids", sampling.stop_token_ids, rule)
    return token_ids


def _slo(request: Request, slos: Mapping[str, SloConfig]) -> SloConfig | None:
    """The class it names; its priority holds unless the request has one of its own."""
    if request.slo is None:
        return None
    if request.slo not in slos:
        rule = f"must be one of {sorted(slos)}" if slos else "this server has no slo classes"
        raise RequestError("slo", request.slo, rule)
    return slos[request.slo]

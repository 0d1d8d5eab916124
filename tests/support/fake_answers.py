"""What a fake worker answers beside its tokens: lengths, ends, log-probabilities to know again."""

from jpd.request import FinishReason, PromptLogprobs, TokenLogprobs
from jpd.worker.protocol import Attempt


def max_tokens_of(attempt: Attempt) -> int:
    assert attempt.sampling.max_tokens is not None, "attempts carry resolved sampling"
    return attempt.sampling.max_tokens


def logprobs_of(attempt: Attempt, token_id: int) -> tuple[TokenLogprobs, ...]:
    """Of the token, when it is asked for: minus the token, to be known again."""
    asked = attempt.sampling.logprobs is not None
    return (TokenLogprobs(-float(token_id), 1),) if asked else ()


def prompt_logprobs_of(attempt: Attempt) -> PromptLogprobs:
    if attempt.sampling.prompt_logprobs is None:
        return ()
    return (None, *(TokenLogprobs(-float(token), 1) for token in attempt.token_ids[1:]))


def end_of(attempt: Attempt, num_produced: int, token_id: int) -> FinishReason | None:
    if token_id in attempt.stop_token_ids and num_produced > attempt.sampling.min_tokens:
        return "stop"
    return "length" if num_produced >= max_tokens_of(attempt) else None

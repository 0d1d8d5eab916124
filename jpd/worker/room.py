"""How much room an attempt needs on a decode worker, and who yields when room runs out.

The youngest of the lowest priority yields. That order is total and stays the same over replays, so
the first in it always goes on and somebody always finishes. Pure; called by
`jpd.worker.decode_attempts`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jpd.cache.page_allocator import num_pages_for
from jpd.errors import RequestError
from jpd.worker.protocol import Attempt, reserved_tokens


@dataclass(frozen=True, slots=True)
class RoomRules:
    """Sizes of one worker, in tokens and pages."""

    worker: str
    page_size: int
    num_pages: int  # of the pool
    max_model_len: int
    reserve_tokens: int  # output tokens reserved with the prompt

    def first_tokens(self, attempt: Attempt) -> int:
        """Tokens that get pages before the attempt begins."""
        num_tokens, max_tokens = len(attempt.token_ids), _max_tokens(attempt)
        return reserved_tokens(num_tokens, max_tokens, self.reserve_tokens)

    def whole_pages(self, attempt: Attempt) -> int:
        """Pages of the whole sequence, if it gets as long as it may."""
        return num_pages_for(len(attempt.token_ids) + _max_tokens(attempt), self.page_size)

    def check(self, attempt: Attempt) -> None:
        """Raises RequestError when the whole sequence can never fit here."""
        max_tokens, num_prompt_tokens = _max_tokens(attempt), len(attempt.token_ids)
        if num_prompt_tokens + max_tokens > self.max_model_len:
            rule = f"{num_prompt_tokens} prompt tokens + this exceed {self.max_model_len} tokens"
            raise RequestError("max_tokens", max_tokens, rule)
        num_pages = self.whole_pages(attempt)
        if num_pages > self.num_pages:
            rule = (
                f"with {num_prompt_tokens} prompt tokens needs {num_pages} KV pages of "
                f"{self.page_size}, worker {self.worker} has {self.num_pages}"
            )
            raise RequestError("max_tokens", max_tokens, rule)


def junior(attempts: Iterable[Attempt], *, below: int | None = None) -> Attempt | None:
    """The one to preempt, of attempts in the order of their reservations.

    `below`: only of a lower priority than this.
    """
    candidates = [
        (attempt.priority, -attempt.sequence, -index, attempt)
        for index, attempt in enumerate(attempts)
        if below is None or attempt.priority < below
    ]
    return min(candidates, key=lambda candidate: candidate[:3])[3] if candidates else None


def by_seniority(attempt: Attempt) -> tuple[int, int]:
    """A sort key: who is served first."""
    return (-attempt.priority, attempt.sequence)


def _max_tokens(attempt: Attempt) -> int:
    assert attempt.sampling.max_tokens is not None, "the router resolves max_tokens"
    return attempt.sampling.max_tokens

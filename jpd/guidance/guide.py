"""Guides: where one attempt stands in its grammar, and which tokens it may take next.

    PENDING ── its thread is done ──> OPEN ── advance ──> PENDING
                                  └─> COMPLETE: nothing may follow
                                  └─> FAILED: a limit was hit, or no token fits

The work is done on the compiler's threads, so the one who follows a guide never computes; it asks
`state` and goes on without the attempt while it is PENDING. Made by `GrammarCompiler.open`.
"""

import enum
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from jpd.errors import RequestError

logger = logging.getLogger(__name__)

NO_TOKEN = "no token of the vocabulary goes on"

Mask = NDArray[np.uint32]
Submit = Callable[[Callable[[], "_Step"]], "Future[_Step]"]


class GuideState(enum.Enum):
    """What the one who follows a guide has to know."""

    PENDING = "pending"
    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"


def mask_width(vocab_size: int) -> int:
    """Words of a mask: one bit for each token, the lowest bit of the first word for token 0."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class EndRule:
    """How an answer of this request may end."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    ignores_eos: bool  # go on while the grammar lets it


@dataclass(frozen=True, slots=True)
class _Step:
    """What a thread found: the state, the mask of an open one, the error of a failed one."""

    state: GuideState
    mask: Mask | None = None
    error: RequestError | None = None


class Guide:
    """One attempt's way through its grammar. All methods on one thread at a time."""

    def __init__(
        self, open_matcher: Callable[[], LLMatcher], end: EndRule, field: str, submit: Submit
    ) -> None:
        """`open_matcher`, called on a thread, gives a matcher of its own; it may raise
        RequestError. `field` is named by errors."""
        self._end, self._field, self._submit = end, field, submit
        self._matcher: LLMatcher | None = None
        self._running = submit(lambda: self._safely(lambda: self._begin(open_matcher)))

    @property
    def state(self) -> GuideState:
        return self._running.result().state if self._running.done() else GuideState.PENDING

    @property
    def mask(self) -> Mask:
        """Bits of the tokens allowed next, uint32 [mask_width]. Only while OPEN."""
        mask = self._running.result().mask
        assert mask is not None, "only an open guide has a mask"
        return mask

    @property
    def error(self) -> RequestError:
        """What is to be told to the client. Only when FAILED."""
        error = self._running.result().error
        assert error is not None, "only a failed guide has an error"
        return error

    @property
    def running(self) -> "Future[_Step]":
        """Done when the state is no more PENDING."""
        return self._running

    def advance(self, token_id: int) -> None:
        """The attempt took this token. PENDING until the next mask is there. Only when OPEN."""
        assert self.state is GuideState.OPEN, "an attempt takes part with an open guide only"
        self._running = self._submit(lambda: self._safely(lambda: self._take(token_id)))

    # On a thread of the compiler.

    def _safely(self, step: Callable[[], _Step]) -> _Step:
        """Whatever goes wrong is this attempt's fault alone, never that of who follows it."""
        try:
            return step()
        except RequestError as error:
            return _Step(GuideState.FAILED, error=error)
        except BaseException as error:  # a panic of the library is no Exception
            logger.exception("a guide broke")
            return self._failed(repr(error))

    def _begin(self, open_matcher: Callable[[], LLMatcher]) -> _Step:
        self._matcher = open_matcher()
        return self._look(self._matcher)

    def _take(self, token_id: int) -> _Step:
        assert self._matcher is not None
        if token_id in self._end.eos_token_ids:
            return _Step(GuideState.COMPLETE)
        if not self._matcher.consume_token(token_id):
            return self._failed(self._matcher.get_error())
        return self._look(self._matcher)

    def _look(self, matcher: LLMatcher) -> _Step:
        """The mask of the present position, with the model's end tokens where it may end."""
        end = self._end
        found = np.zeros((1, mask_width(end.vocab_size + 1)), np.int32)
        fill_next_token_bitmask(matcher, found)
        if matcher.is_error():
            return self._failed(matcher.get_error())
        words = found[0].view(np.uint32)
        may_end = _take_bit(words, end.vocab_size)
        if not words.any():
            return _Step(GuideState.COMPLETE) if may_end else self._failed(NO_TOKEN)
        if may_end and not end.ignores_eos:
            for token_id in end.eos_token_ids:
                words[token_id // 32] |= np.uint32(1 << (token_id % 32))
        return _Step(GuideState.OPEN, mask=words[: mask_width(end.vocab_size)])

    def _failed(self, reason: str) -> _Step:
        told = reason.partition("\n")[0]
        told = NO_TOKEN if told.startswith("NoExtension") else told
        rule = f"cannot be followed any further: {told}"
        return _Step(GuideState.FAILED, error=RequestError(self._field, "...", rule))


def _take_bit(words: Mask, index: int) -> bool:
    """Clear a bit; whether it was set."""
    word, bit = index // 32, np.uint32(1 << (index % 32))
    is_set = bool(words[word] & bit)
    words[word] &= ~bit
    return is_set


def wait_for_any(guides: Sequence[Guide], timeout_seconds: float) -> None:
    """Block until one of these is no more PENDING, or the time has passed."""
    wait([g.running for g in guides], timeout_seconds, return_when="FIRST_COMPLETED")

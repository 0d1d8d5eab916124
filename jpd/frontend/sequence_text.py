"""The token events of one sequence → text that can be shown, and the true end.

Knows tokenizer, stop strings and end tokens; no request, no transport. Called by TextService, once
for each sequence. Detokenising here is incremental and cheap, so it runs on the event loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jpd.frontend.stop import StopMatcher, StopPatterns
from jpd.request import FinishReason, TokenOutput
from jpd.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of a sequence's output is text to show; shared by all sequences of a job."""

    patterns: StopPatterns
    hidden_token_ids: frozenset[int]  # end tokens: not shown when they end the sequence
    min_tokens: int = 0  # a stop string must lie wholly behind this many tokens
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ShownText:
    """What one event adds."""

    text: str
    token_ids: tuple[int, ...]  # up to the one that completed a stop string
    finish_reason: FinishReason | None


class SequenceText:
    """Detokeniser and stop matcher of one sequence. Without a tokenizer all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, rules: TextRules) -> None:
        self._decoder = (
            None if tokenizer is None else IncrementalDecoder(tokenizer, rules.skip_special_tokens)
        )
        self._rules = rules
        self._matcher = (
            StopMatcher(rules.patterns, rules.include_stop) if rules.patterns.stops else None
        )
        self._num_tokens = 0

    def push(self, output: TokenOutput) -> ShownText:
        """Mutates. After a result with a finish reason it must not be called again."""
        if self._decoder is None:
            return ShownText("", output.token_ids, output.finish_reason)
        visible = self._visible(output)
        if self._matcher is None:
            text = self._decoder.push(visible)
            if output.finish_reason is not None:
                text += self._decoder.finish()
            return ShownText(text, output.token_ids, output.finish_reason)
        return self._push_matched(self._matcher, self._decoder, visible, output)

    def _visible(self, output: TokenOutput) -> tuple[int, ...]:
        """The tokens that become text: not the one that ended it, unless that is asked for."""
        ids = output.token_ids
        ended = output.finish_reason == "stop" and ids and ids[-1] in self._rules.hidden_token_ids
        return ids[:-1] if ended and not self._rules.include_stop else ids

    def _push_matched(
        self,
        matcher: StopMatcher,
        decoder: IncrementalDecoder,
        visible: Sequence[int],
        output: TokenOutput,
    ) -> ShownText:
        text = ""
        for position, token_id in enumerate(visible):
            piece = decoder.push((token_id,))
            self._num_tokens += 1
            if self._num_tokens <= self._rules.min_tokens:
                text += piece
                continue
            text += matcher.push(piece)
            if matcher.stop is not None:
                return ShownText(text, output.token_ids[: position + 1], "stop")
        if output.finish_reason is None:
            return ShownText(text, output.token_ids, None)
        text += matcher.push(decoder.finish())
        if matcher.stop is None:
            return ShownText(text + matcher.finish(), output.token_ids, output.finish_reason)
        return ShownText(text, output.token_ids, "stop")

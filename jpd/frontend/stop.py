"""Finds stop strings in text that arrives in pieces, and holds back only what may become one.

Knows text alone: no tokens, no requests. Called by SequenceText. The stop that is complete first
wins, of two that end together the longer one; so the answer does not depend on where the pieces
were cut.
"""

from collections.abc import Sequence


class StopPatterns:
    """The stop strings of one request with their fallback tables (Knuth, Morris, Pratt)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.fallbacks = tuple(_fallback_table(stop) for stop in stops)


class StopMatcher:
    """One pass over one text.

    `push` returns what can be shown. After it has set `stop`, the text has ended and push must not
    be called.
    """

    def __init__(self, patterns: StopPatterns, include_stop: bool) -> None:
        self._patterns = patterns
        self._include_stop = include_stop
        self._matched = [0] * len(
            patterns.stops
        )  # characters of each stop that end the text so far
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown now; up to the stop string when `text` completes one."""
        seen = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            if self._advance(character):
                stop = max(self._complete(), key=len)
                self.stop, self._held = stop, ""
                return seen[:position] if self._include_stop else seen[: position - len(stop)]
        num_held = max(self._matched, default=0)
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held]

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> bool:
        """Mutates the match lengths by one character; True when a stop is complete."""
        complete = False
        matched = self._matched
        for index, stop in enumerate(self._patterns.stops):
            length = matched[index]
            while length and stop[length] != character:
                length = self._patterns.fallbacks[index][length]
            if stop[length] == character:
                length += 1
            matched[index] = length
            complete = complete or length == len(stop)
        return complete

    def _complete(self) -> list[str]:
        pairs = zip(self._patterns.stops, self._matched, strict=True)
        return [stop for stop, length in pairs if length == len(stop)]


def _fallback_table(stop: str) -> tuple[int, ...]:
    """table[n]: the longest proper prefix of `stop` that ends stop[:n], e.g. "aab" → (0, 0, 1)."""
    table = [0] * max(len(stop), 1)
    length = 0
    for position in range(1, len(stop) - 1):
        while length and stop[position] != stop[length]:
            length = table[length]
        if stop[position] == stop[length]:
            length += 1
        table[position + 1] = length
    return tuple(table)

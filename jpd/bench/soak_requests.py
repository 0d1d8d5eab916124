"""Requests of every kind, drawn at random: lengths, settings, ends, guides, paths, clients that
leave, and requests that must be refused. Knows no server. Called by the soak.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"the": {"enum": ["on", "off"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["the", "n"],
    "additionalProperties": False,
}
CHOICES, REGEX = ["yes", "no", "the other"], "(a|the|[b-z]{2,5})( the){0,3}"
BAD: Sequence[dict[str, Any]] = (
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"max_tokens": 0},
    {"max_tokens": 1 << 30},
    {"n": 0},
    {"logprobs": 99},
)
"""Each is refused, whatever else is asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and whether its client leaves before the end."""

    prompt: str | list[int]
    options: dict[str, Any]
    leaves_after_seconds: float | None = None
    leaves_after_deltas: int | None = None
    is_bad: bool = False

    @property
    def stays(self) -> bool:
        return self.leaves_after_seconds is None and self.leaves_after_deltas is None

    @property
    def is_determined(self) -> bool:
        has_seed = self.options["temperature"] == 0.0 or "seed" in self.options
        return self.stays and has_seed and "timeout_seconds" not in self.options

    def alone(self, number: int) -> "Asked":
        """On the other path, without drafts, without a prefix that somebody else computed."""
        options = dict(self.options, cache_salt=f"alone {number}")
        for name in ("session_id", "priority", "num_speculative_tokens"):
            options.pop(name, None)
        options["disaggregate"] = not options.get("disaggregate", True)
        return replace(self, options=options)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be, by the server's sizes."""

    max_len: int  # of prompt and output together
    vocab_size: int
    page_size: int
    chunk: int
    first_token: int = 3  # those before it are special
    has_text: bool = True  # the model has a tokenizer
    max_drafts: int = 3
    longest_output: int = 40  # of most requests

    @property
    def edges(self) -> list[int]:
        """Prompt lengths around those of pages, chunks and the context."""
        found = {1, 2, self.max_len // 2, self.max_len * 7 // 8, self.max_len - 2}
        for size in (self.page_size, self.chunk, 2 * self.chunk):
            found |= {size - 1, size, size + 1}
        return sorted(length for length in found if 0 < length < self.max_len - 1)


class Draw(random.Random):
    """Requests of every kind, in the proportions of no workload."""

    def __init__(self, seed: int, limits: Limits, bad_share: float = 0.05) -> None:
        super().__init__(seed)
        self._limits, self._bad_share = limits, bad_share
        self.prefixes = [self.token_ids(limits.max_len) for _ in range(3)]

    def token_ids(self, num_tokens: int) -> list[int]:
        return [
            self.randrange(self._limits.first_token, self._limits.vocab_size)
            for _ in range(num_tokens)
        ]

    def is_so(self, probability: float) -> bool:
        return self.random() < probability

    def asked(self) -> Asked:
        prompt, num_tokens = self.prompt()
        room = self._limits.max_len - num_tokens
        options = self.lengths(room) | self.sampling() | self.routing()
        asked = Asked(prompt, options | self.ends() | self.guidance())
        if self.is_so(self._bad_share):
            return replace(asked, options=asked.options | self.choice(BAD), is_bad=True)
        if self.is_so(0.12):
            return replace(asked, leaves_after_seconds=self.uniform(0.0, 0.5))
        if self.is_so(0.12):
            return replace(asked, leaves_after_deltas=self.randint(1, 8))
        return asked

    def prompt(self) -> tuple[str | list[int], int]:
        """Text, or token ids that may begin as others do; and at most how many tokens it has."""
        if self._limits.has_text and self.is_so(0.2):
            text = " ".join(self.choices(["the", "cat", "in", "é", "🙂"], k=self.randint(1, 8)))
            return text, 1 + len(text.encode())
        edges, longest = self._limits.edges, self._limits.max_len * 4 // 5
        num_tokens = self.choice(edges) if self.is_so(0.5) else self.randint(1, longest)
        if self.is_so(0.4):
            return self.choice(self.prefixes)[:num_tokens], num_tokens
        return self.token_ids(num_tokens), num_tokens

    def lengths(self, room: int) -> dict[str, Any]:
        """Up to the end of the context, sometimes without a word about it."""
        if self.is_so(0.1):
            return {}
        longest = room if self.is_so(0.2) else min(room, self._limits.longest_output)
        max_tokens = 1 if self.is_so(0.1) else self.randint(1, longest)
        found: dict[str, Any] = {"max_tokens": max_tokens}
        if self.is_so(0.25):
            found["min_tokens"] = self.randint(0, max_tokens)
        return found

    def sampling(self) -> dict[str, Any]:
        known = range(self._limits.first_token, self._limits.vocab_size)
        biased = self.sample(known, 5)
        some: dict[str, tuple[float, Any]] = {
            "top_p": (0.3, self.uniform(0.3, 1.0)),
            "top_k": (0.3, self.randint(1, self._limits.vocab_size)),
            "min_p": (0.2, self.uniform(0.0, 0.3)),
            "repetition_penalty": (0.25, self.uniform(0.7, 1.5)),
            "presence_penalty": (0.25, self.uniform(-1.0, 2.0)),
            "frequency_penalty": (0.25, self.uniform(-1.0, 2.0)),
            "logit_bias": (0.25, {token: self.choice((-100, 3, 30, 30)) for token in biased}),
            "seed": (0.7, self.randrange(-(1 << 63), 1 << 63)),
            "logprobs": (0.3, self.randint(0, 20)),
            "prompt_logprobs": (0.15, self.randint(0, 20)),
            "num_speculative_tokens": (0.3, self.randint(1, self._limits.max_drafts)),
            "n": (0.15, self.randint(2, 3)),
        }
        chosen = {name: value for name, (p, value) in some.items() if self.is_so(p)}
        return {"temperature": self.choice((0.0, 0.0, 0.7, 1.5))} | chosen

    def ends(self) -> dict[str, Any]:
        known = range(self._limits.first_token, self._limits.vocab_size)
        stops = self.choices(["a", "he", "th", "!?", "  "], k=2)
        some: dict[str, tuple[float, Any]] = {
            "stop": (0.2 if self._limits.has_text else 0.0, stops),
            "stop_token_ids": (0.2, self.sample(known, 8)),
            "ignore_eos": (0.4, True),
            "include_stop_str_in_output": (0.2, True),
        }
        return {name: value for name, (p, value) in some.items() if self.is_so(p)}

    def guidance(self) -> dict[str, Any]:
        if not (self._limits.has_text and self.is_so(0.25)):
            return {}
        kinds: tuple[dict[str, Any], ...] = (
            {"guided_regex": REGEX},
            {"guided_choice": CHOICES},
            {"guided_json": SCHEMA},
        )
        return self.choice(kinds)

    def routing(self) -> dict[str, Any]:
        some: dict[str, tuple[float, Any]] = {
            "session_id": (0.2, f"session {self.randint(0, 2)}"),
            "cache_salt": (0.1, "salt"),
            "priority": (0.3, self.randint(-1, 2)),
            "disaggregate": (0.6, self.is_so(0.5)),
            "timeout_seconds": (0.1, self.choice((0.02, 0.1, 5.0))),
        }
        return {name: value for name, (p, value) in some.items() if self.is_so(p)}

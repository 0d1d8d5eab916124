"""Requests of every kind, drawn at random: lengths, settings, ends, guides, paths, and clients that
leave. Knows no server. Used by test_traffic.py."""

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.launch.tiny_fleets import MAX_LEN
from tests.support.tiny_tokenizer import VOCAB_SIZE

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 96, 112, 126)
"""Lengths around those of pages, chunks and tables."""

SCHEMA = {
    "type": "object",
    "properties": {"the": {"enum": ["on", "off"]}, "n": {"type": "integer", "maximum": 99}},
    "required": ["the", "n"],
    "additionalProperties": False,
}
CHOICES, REGEX = ["yes", "no", "the other"], "(a|the|[b-z]{2,5})( the){0,3}"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, and whether its client leaves before the end."""

    prompt: str | list[int]
    options: dict[str, Any]
    leaves_after_seconds: float | None = None
    leaves_after_deltas: int | None = None

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


class Draw(random.Random):
    """Requests of every kind, in the proportions of no workload."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.prefixes = [self.token_ids(MAX_LEN) for _ in range(3)]

    def token_ids(self, num_tokens: int) -> list[int]:
        return [self.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]

    def is_so(self, probability: float) -> bool:
        return self.random() < probability

    def asked(self) -> Asked:
        prompt, num_tokens = self.prompt()
        options = self.lengths(MAX_LEN - num_tokens) | self.sampling() | self.routing()
        asked = Asked(prompt, options | self.ends() | self.guidance())
        if self.is_so(0.12):
            return replace(asked, leaves_after_seconds=self.uniform(0.0, 0.5))
        if self.is_so(0.12):
            return replace(asked, leaves_after_deltas=self.randint(1, 8))
        return asked

    def prompt(self) -> tuple[str | list[int], int]:
        """Text, or token ids that may begin as others do; and at most how many tokens it has."""
        if self.is_so(0.2):
            text = " ".join(self.choices(["the", "cat", "in", "é", "🙂"], k=self.randint(1, 8)))
            return text, 1 + len(text.encode())
        num_tokens = self.choice(EDGES) if self.is_so(0.5) else self.randint(1, 100)
        if self.is_so(0.4):
            return self.choice(self.prefixes)[:num_tokens], num_tokens
        return self.token_ids(num_tokens), num_tokens

    def lengths(self, room: int) -> dict[str, Any]:
        """Up to the end of the context, sometimes without a word about it."""
        if self.is_so(0.1):
            return {}
        longest = room if self.is_so(0.2) else min(room, 40)
        max_tokens = 1 if self.is_so(0.1) else self.randint(1, longest)
        found: dict[str, Any] = {"max_tokens": max_tokens}
        if self.is_so(0.25):
            found["min_tokens"] = self.randint(0, max_tokens)
        return found

    def sampling(self) -> dict[str, Any]:
        biased = self.sample(range(3, VOCAB_SIZE), 5)
        some: dict[str, tuple[float, Any]] = {
            "top_p": (0.3, self.uniform(0.3, 1.0)),
            "top_k": (0.3, self.randint(1, VOCAB_SIZE)),
            "min_p": (0.2, self.uniform(0.0, 0.3)),
            "repetition_penalty": (0.25, self.uniform(0.7, 1.5)),
            "presence_penalty": (0.25, self.uniform(-1.0, 2.0)),
            "frequency_penalty": (0.25, self.uniform(-1.0, 2.0)),
            "logit_bias": (0.25, {token: self.choice((-100, 3, 30, 30)) for token in biased}),
            "seed": (0.7, self.randrange(-(1 << 63), 1 << 63)),
            "logprobs": (0.3, self.randint(0, 20)),
            "prompt_logprobs": (0.15, self.randint(0, 20)),
            "num_speculative_tokens": (0.3, self.randint(1, 3)),
            "n": (0.15, self.randint(2, 3)),
        }
        chosen = {name: value for name, (p, value) in some.items() if self.is_so(p)}
        return {"temperature": self.choice((0.0, 0.0, 0.7, 1.5))} | chosen

    def ends(self) -> dict[str, Any]:
        some: dict[str, tuple[float, Any]] = {
            "stop": (0.2, self.choices(["a", "he", "th", "!?", "  "], k=2)),
            "stop_token_ids": (0.2, self.sample(range(3, VOCAB_SIZE), 8)),
            "ignore_eos": (0.4, True),
            "include_stop_str_in_output": (0.2, True),
        }
        return {name: value for name, (p, value) in some.items() if self.is_so(p)}

    def guidance(self) -> dict[str, Any]:
        if not self.is_so(0.25):
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

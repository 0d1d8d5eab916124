"""What clients of a soak heard, and what must hold of it whatever the tokens are.

A Ledger counts, and keeps for each invariant the first words of what broke it. Called by the soak.
"""

import json
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jpd.bench.results import Result
from jpd.bench.soak_requests import CHOICES, REGEX, Asked
from jpd.errors import DeadlineError, JpdError, OverloadedError, RequestError, WorkerError
from jpd.request import PromptLogprobs, Timeline, TokenLogprobs

INVARIANTS = (
    "I1 gauges at rest",
    "I2 tokens as alone",
    "I3 one end of each request",
    "I4 a bad request is refused, and alone",
    "I5 health tells the truth",
    "I6 no silent fallback",
    "I7 no page has two owners",
    "I8 nothing compiles after ready",
)
LOGPROB_TOLERANCE = 2e-4
WORDS_KEPT = 5


class Delta(Protocol):
    """What is read of `jpd.TextDelta`."""

    @property
    def index(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def timeline(self) -> Timeline | None: ...

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]: ...

    @property
    def prompt_logprobs(self) -> PromptLogprobs: ...


class Streams(Protocol):
    """What is needed of `jpd.api.Server`."""

    def astream(
        self, prompt: str | Sequence[int], **options: Any
    ) -> AsyncGenerator[Delta, None]: ...


@dataclass(slots=True)
class Answer:
    """What came of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = ()
    end: str | None = None
    num_ends: int = 0
    timeline: Timeline | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.num_ends += delta.finish_reason is not None
        self.end, self.timeline = delta.finish_reason, delta.timeline


@dataclass(frozen=True, slots=True)
class Heard:
    """All that a client was told: its choices, and the error that ended them."""

    asked: Asked
    choices: Sequence[Answer]
    error: JpdError | None = None

    @property
    def num_ends(self) -> int:
        return sum(choice.end is not None for choice in self.choices)


class Ledger:
    """Counts of a soak, and what was wrong."""

    def __init__(self) -> None:
        self.num_requests = self.num_leavers = self.num_refused = 0
        self.num_told = 0  # choices whose client heard their end
        self.num_left = 0  # choices whose client did not
        self.num_failed = 0  # requests that ended with an error for a client that stayed
        self.num_retries = 0  # that answers tell
        self.num_violations: dict[str, int] = defaultdict(int)
        self.words: list[str] = []

    def count(self, heard: Heard) -> None:
        self.num_requests += 1
        if isinstance(heard.error, RequestError):
            self.num_refused += 1
            return  # the router has not heard of it
        self.num_leavers += not heard.asked.stays
        self.num_told += heard.num_ends
        self.num_left += len(heard.choices) - heard.num_ends
        self.num_failed += heard.asked.stays and heard.error is not None

    def note(self, invariant: str, is_right: bool, what: object) -> None:
        """`what` is told when it is not."""
        assert invariant in INVARIANTS, invariant
        if not is_right:
            self.num_violations[invariant] += 1
            if self.num_violations[invariant] <= WORDS_KEPT:
                self.words.append(f"{invariant}: {what}")

    def results(self) -> list[Result]:
        return [
            Result(f"{invariant}: violations", self.num_violations[invariant], "", 0.0)
            for invariant in INVARIANTS
        ]


def check_answer(one: Heard, ledger: Ledger, *, hosts_are_killed: bool) -> None:
    """Ends, errors, refusals, lengths, guides and paths."""
    is_refused = isinstance(one.error, RequestError)
    ledger.note("I4 a bad request is refused, and alone", is_refused == one.asked.is_bad, one)
    if one.error is not None and not is_refused:
        is_due = isinstance(one.error, DeadlineError | OverloadedError)
        is_due = is_due and "timeout_seconds" in one.asked.options
        is_lost = hosts_are_killed and isinstance(
            one.error, WorkerError | DeadlineError | OverloadedError
        )
        ledger.note("I3 one end of each request", is_due or is_lost, one)
    if one.asked.stays and one.error is None:
        is_ended = one.num_ends == len(one.choices)
        ledger.note("I3 one end of each request", is_ended, one)
    for choice in one.choices:
        ledger.note("I3 one end of each request", choice.num_ends <= 1, one)
        ledger.note("I2 tokens as alone", is_as_asked(one.asked, choice), one)
        if choice.timeline is not None:
            ledger.num_retries += choice.timeline.num_retries
            ledger.note("I6 no silent fallback", bool(choice.timeline.path), choice.timeline)


def is_as_asked(asked: Asked, choice: Answer) -> bool:
    """Lengths, log-probabilities, and the guide of an answer that ended by itself."""
    options = asked.options
    if len(choice.token_ids) > (options.get("max_tokens") or len(choice.token_ids)):
        return False
    if "logprobs" in options and len(choice.logprobs) != len(choice.token_ids):
        return False
    if choice.end != "stop":
        return True
    is_guided = bool(options.keys() & {"guided_choice", "guided_regex", "guided_json"})
    if not is_guided and len(choice.token_ids) < options.get("min_tokens", 0):
        return False
    if options.keys() & {"stop", "stop_token_ids"}:
        return True
    if "guided_choice" in options:
        return choice.text in CHOICES
    if "guided_regex" in options:
        return re.fullmatch(REGEX, choice.text) is not None
    if "guided_json" in options:
        return bool(json.loads(choice.text)["the"] in ("on", "off"))
    return True


def check_same(one: Heard, alone: Heard, ledger: Ledger) -> None:
    """I2: text, tokens and ends are equal, log-probabilities nearly."""
    for found, wanted in zip(one.choices, alone.choices, strict=True):
        told = (found.token_ids, found.text, found.end)
        expected = (wanted.token_ids, wanted.text, wanted.end)
        ledger.note("I2 tokens as alone", told == expected, (one.asked, told, expected))
        for entries, others in (
            (found.logprobs, wanted.logprobs),
            (found.prompt_logprobs, wanted.prompt_logprobs),
        ):
            numbers = [[entry.logprob for entry in of if entry] for of in (entries, others)]
            is_near = len(numbers[0]) == len(numbers[1]) and bool(
                np.allclose(numbers[0], numbers[1], atol=LOGPROB_TOLERANCE)
            )
            ledger.note("I2 tokens as alone", is_near, (one.asked, "log-probabilities"))

"""Faults that a fake worker commits on command."""

from dataclasses import dataclass, field
from typing import Literal

Verb = Literal["reserve", "prefill", "transfer", "decode"]
Fault = Exception | Literal["hang"]


@dataclass(slots=True)
class _Entry:
    fault: Fault
    times: int
    after_tokens: int


@dataclass(slots=True)
class FaultScript:
    """Per verb, the faults to come, in order."""

    _entries: dict[Verb, list[_Entry]] = field(default_factory=dict)

    def add(self, verb: Verb, fault: Fault, times: int = 1, after_tokens: int = 0) -> None:
        self._entries.setdefault(verb, []).append(_Entry(fault, times, after_tokens))

    def take(self, verb: Verb, num_tokens: int = 0) -> Fault | None:
        """The fault that is due now, used up once; None: do your work."""
        entries = self._entries.get(verb)
        if not entries or num_tokens < entries[0].after_tokens:
            return None
        entry = entries[0]
        entry.times -= 1
        if entry.times == 0:
            entries.pop(0)
        return entry.fault

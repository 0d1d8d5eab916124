"""Peers take turns, and their times become tokens per second; no peer needs to be installed."""

import pytest

from jpd.bench import llama_peer, peers, transformers_peer
from jpd.checkpoint.model_source import open_model
from jpd.errors import ConfigError


class Clockwork:
    """Takes as long as it is told to, longer the first time."""

    def __init__(self, name: str, seconds: float, calls: list[str]) -> None:
        self.name, self._seconds, self._calls = name, seconds, calls

    def prefill_seconds(self, num_tokens: int, num_prompts: int) -> float:
        assert (num_tokens, num_prompts) == (peers.CONTEXT, 1)
        return self._take("prefill")

    def decode_seconds(self, batch: int, context: int, num_steps: int) -> float:
        assert context == peers.CONTEXT
        return self._take(f"decode {batch}") * batch

    def _take(self, what: str) -> float:
        call = f"{self.name} {what}"
        self._calls.append(call)
        return self._seconds if self._calls.count(call) > 1 else 100.0


def test_all_take_turns_and_the_first_turn_does_not_count() -> None:
    calls: list[str] = []
    both = [Clockwork("a", 0.5, calls), Clockwork("b", 0.25, calls)]
    results = peers.side_by_side(both, (1, 4), peers.QUICK, lambda line: None)
    assert [(result.name, result.value) for result in results] == [
        ("prefill of 512 tokens: a", 1024.0),
        ("prefill of 512 tokens: b", 2048.0),
        ("decode, batch 1, 512 tokens each: a", 2.0),
        ("decode, batch 1, 512 tokens each: b", 4.0),
        ("decode, batch 4, 512 tokens each: a", 2.0),
        ("decode, batch 4, 512 tokens each: b", 4.0),
    ]
    assert calls[:6] == ["a prefill", "b prefill"] * 3


def test_without_a_peer_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, golden_llama3: object
) -> None:
    for module in (llama_peer, transformers_peer):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"jpd\[peers\]"):
        peers.run(open_model(str(golden_llama3)), lambda line: None)

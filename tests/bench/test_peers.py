"""Peers take turns, and their times become tokens per second; no peer needs to be installed."""

import os
from functools import partial
from typing import Any

import pytest

from jpd.bench import llama_peer, peers, transformers_peer
from jpd.bench.peer_process import DeadPeerError, LatePeerError, PeerProcess
from jpd.errors import ConfigError
from tests.bench.sleeper import Sleeper, refuse

FOREVER = 1e9


class Clockwork:
    """Takes as long as it is told to, longer the first time; late, or dead, where it is told to."""

    def __init__(
        self, name: str, seconds: float, calls: list[str], late: str = "none", dead: str = "none"
    ) -> None:
        self.name, self._seconds, self._calls = name, seconds, calls
        self._late, self._dead = late, dead

    def ask(self, verb: str, arguments: tuple[object, ...], timeout_seconds: float) -> Any:
        assert 0.0 < timeout_seconds <= peers.QUICK.point_seconds
        call = f"{self.name} {verb} {arguments}"
        self._calls.append(call)
        if self._late in call:
            raise LatePeerError(call)
        if self._dead in call:
            raise DeadPeerError(self.name, -11)
        return self._seconds if self._calls.count(call) > 1 else 100.0


def test_all_take_turns_and_the_first_turn_does_not_count() -> None:
    calls: list[str] = []
    both = [Clockwork("a", 0.5, calls), Clockwork("b", 0.25, calls)]
    results = peers.side_by_side(both, (1, 4), peers.QUICK, lambda line: None, FOREVER)
    assert [(result.name, result.value) for result in results] == [
        ("prefill, batch 1, 128 tokens each: a", 256.0),
        ("prefill, batch 1, 128 tokens each: b", 512.0),
        ("decode, batch 1, 512 tokens each: a", 2.0),
        ("decode, batch 1, 512 tokens each: b", 4.0),
        ("prefill, batch 4, 128 tokens each: a", 1024.0),
        ("prefill, batch 4, 128 tokens each: b", 2048.0),
        ("decode, batch 4, 512 tokens each: a", 8.0),
        ("decode, batch 4, 512 tokens each: b", 16.0),
    ]
    assert calls[:6] == [f"{name} prefill_seconds (128, 1)" for name in "ab"] * 3


def test_a_point_that_does_not_end_is_told_and_the_others_are_measured() -> None:
    calls: list[str] = []
    both = [Clockwork("a", 0.5, calls), Clockwork("b", 0.5, calls, late="decode_seconds (1,")]
    results = peers.side_by_side(both, (1, 4), peers.QUICK, lambda line: None, FOREVER)
    late = [result for result in results if "not ended" in result.name]
    assert [(result.name, result.value, result.unit) for result in late] == [
        ("decode, batch 1, 512 tokens each: b: not ended in", peers.QUICK.point_seconds, "s")
    ]
    assert len(results) == 8 and sum("b decode_seconds (1," in call for call in calls) == 1


def test_a_peer_that_ends_by_itself_is_told_and_the_others_are_measured() -> None:
    both = [Clockwork("a", 0.5, []), Clockwork("b", 0.5, [], dead="prefill_seconds (128, 4")]
    results = peers.side_by_side(both, (1, 4), peers.QUICK, lambda line: None, FOREVER)
    dead = [result for result in results if result.unit != "tokens/s"]
    assert [(result.name, result.value) for result in dead] == [
        ("prefill, batch 4, 128 tokens each: b: ended by itself, status", -11)
    ]
    assert len(results) == 8


def test_when_the_run_is_over_every_point_is_told_and_none_is_begun() -> None:
    calls: list[str] = []
    peer = Clockwork("a", 0.5, calls)
    results = peers.side_by_side([peer], peers.BATCHES, peers.QUICK, lambda line: None, 0.0)
    assert [result.name.endswith("a: not begun in") for result in results] == [True] * 6
    assert {result.value for result in results} == {peers.QUICK.run_seconds}
    assert not calls


@pytest.mark.slow
def test_a_late_peer_is_ended_and_the_next_question_starts_another() -> None:
    with PeerProcess("sleeper", Sleeper) as peer:
        first = peer.ask("sleep", (0.0,), 60.0)
        with pytest.raises(LatePeerError, match="sleeper"):
            peer.ask("sleep", (100.0,), 0.2)
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert peer.ask("sleep", (0.0,), 60.0) != first
        with pytest.raises(RuntimeError, match="sleeper: ValueError.*no such thing"):
            peer.ask("fail", (), 60.0)
    with PeerProcess("none", refuse) as peer, pytest.raises(ConfigError, match="must be 2"):
        peer.ask("sleep", (0.0,), 60.0)
    with PeerProcess("gone", partial(os._exit, 3)) as peer, pytest.raises(DeadPeerError, match="3"):
        peer.ask("sleep", (0.0,), 60.0)


def test_without_a_peer_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (llama_peer, transformers_peer):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"jpd\[peers\]"):
        peers.run("any", lambda line: None)

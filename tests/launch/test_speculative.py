"""Speculation through launched workers: the same tokens on both paths, counted where it is seen."""

import itertools
import time

import pytest

import jpd
from jpd.api import Server

pytestmark = pytest.mark.slow  # a fleet is compiled

PROMPTS = ["on the on the on the on", "abcabcabcabcabcabcabc"]


def answers(server: Server, **options: object) -> list[jpd.Generation]:
    return server.generate(PROMPTS, max_tokens=50, ignore_eos=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4}])
def test_the_same_tokens_on_both_paths(server: Server, sampling: dict[str, object]) -> None:
    plain = answers(server, **sampling)
    for apart, num_drafts in itertools.product((True, False), (1, 3, 9)):
        found = answers(server, disaggregate=apart, num_speculative_tokens=num_drafts, **sampling)
        assert [a.token_ids for a in found] == [a.token_ids for a in plain]


def test_it_is_told_how_many_were_right(server: Server) -> None:
    def counted(name: str) -> float:
        return server.metrics.value(f"jpd:spec_decode_num_{name}_tokens_total", worker="decode-0")

    for answer in answers(server, temperature=0.0):
        assert answer.timeline is not None and answer.timeline.num_draft_tokens == 0
    before = counted("draft")
    timelines = [a.timeline for a in answers(server, temperature=0.0, num_speculative_tokens=3)]
    num_verified = sum(t.num_draft_tokens for t in timelines if t is not None)
    num_right = sum(t.num_accepted_tokens for t in timelines if t is not None)
    assert 0 < num_right <= num_verified
    limit = time.monotonic() + 10
    while counted("draft") < before + num_verified:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert counted("accepted") >= num_right


def test_guided_answers_do_not_speculate(server: Server) -> None:
    options = {"guided_regex": "(ab){20}", "max_tokens": 60, "seed": 1}
    (plain,) = server.generate("ab", **options)  # type: ignore[arg-type]
    (found,) = server.generate("ab", num_speculative_tokens=3, **options)  # type: ignore[arg-type]
    assert found.token_ids == plain.token_ids
    assert found.timeline is not None and found.timeline.num_draft_tokens == 0


def test_the_next_turn_finds_right_pages(server: Server) -> None:
    """A prompt that continues a speculated answer, with its pages and computed anew."""

    def ask(prompt: tuple[int, ...], num_drafts: int, salt: str) -> jpd.Generation:
        (answer,) = server.generate(
            prompt,
            max_tokens=40,
            temperature=0.0,
            ignore_eos=True,
            disaggregate=False,
            num_speculative_tokens=num_drafts,
            cache_salt=salt,
        )
        return answer

    first = tuple(range(30, 37)) * 4
    whole = (*first, *ask(first, 3, "speculated").token_ids, 5, 6)
    cached, fresh = ask(whole, 0, "speculated"), ask(whole, 0, "fresh")
    assert cached.timeline is not None and cached.timeline.num_cached_tokens == 64
    assert cached.token_ids == fresh.token_ids

"""What is refused at once, and how open choices are made."""

from dataclasses import replace

import pytest

from jpd.config import SloConfig
from jpd.errors import RequestError
from jpd.request import Request, SamplingParams
from jpd.router.policy import WorkerView
from jpd.router.record import ResolvedRequest
from jpd.router.resolve import Limits, resolve

DECODE = WorkerView("d", "decode", True, False, True, num_slots=4, num_pages=10)
PREFILL = WorkerView("p", "prefill", True, False, True, num_slots=0, num_pages=10)
FLEET = (PREFILL, DECODE)
LIMITS = Limits(max_model_len=41, page_size=16, vocab_size=100)
SLOS = {"fast": SloConfig("fast", 100.0, 10.0, priority=7)}


def make(num_prompt_tokens: int, max_tokens: int | None = None, **fields: object) -> Request:
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
    prompt = (1,) * num_prompt_tokens
    return Request("r", prompt, sampling, 0.0, 60.0, **fields)  # type: ignore[arg-type]


def resolved(request: Request, limits: Limits = LIMITS, fleet: tuple = FLEET) -> ResolvedRequest:
    return resolve(request, limits, fleet, SLOS, lambda: 42)


def test_f16_the_true_length_decides() -> None:
    assert resolved(make(39)).max_tokens == 2
    assert resolved(make(40)).max_tokens == 1
    for num_tokens in (41, 63):
        with pytest.raises(RequestError, match="context of 41"):
            resolved(make(num_tokens))


def test_e11_an_output_that_cannot_fit_is_refused() -> None:
    assert resolved(make(30, 11)).max_tokens == 11
    for max_tokens in (12, 10**9):
        with pytest.raises(RequestError, match="max_tokens = .*leave 11 of a context of 41"):
            resolved(make(30, max_tokens))


def test_c13_the_largest_pool_bounds_a_sequence_too() -> None:
    small, large = replace(DECODE, num_pages=1), replace(DECODE, num_pages=2, is_available=False)
    limits = replace(LIMITS, max_model_len=1000)
    assert resolved(make(31), limits, (PREFILL, small, large)).max_tokens == 1
    with pytest.raises(RequestError, match="context of 32"):
        resolved(make(32), limits, (PREFILL, small, large))


def test_min_tokens_beyond_the_rest_of_the_context_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        resolved(make(39, sampling=SamplingParams(min_tokens=3)))


@pytest.mark.parametrize("prompt", [(), (-1,), (100,), (5, 2**31)])
def test_e14_prompt_ids_outside_the_vocabulary(prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="prompt"):
        resolved(replace(make(1), prompt_token_ids=prompt))
    resolved(replace(make(1), prompt_token_ids=(99,)))


def test_e24_a_missing_seed_is_drawn_and_zero_is_not_missing() -> None:
    assert resolved(make(1)).sampling.seed == 42
    assert resolved(make(1, sampling=SamplingParams(seed=0))).sampling.seed == 0


def test_e23_end_tokens_and_own_stop_ids() -> None:
    sampling = SamplingParams(stop_token_ids=(3, 9))
    request = make(1, sampling=sampling, eos_token_ids=(2, 3))
    assert resolved(request).stop_token_ids == (2, 3, 9)
    ignoring = replace(request, sampling=replace(sampling, ignore_eos=True))
    assert resolved(ignoring).stop_token_ids == (3, 9)
    too_many = SamplingParams(stop_token_ids=tuple(range(10, 26)))
    with pytest.raises(RequestError, match="1 end tokens included"):
        resolved(make(1, sampling=too_many, eos_token_ids=(2,)))


def test_b07_priority_comes_from_the_request_or_its_class() -> None:
    assert resolved(make(1)).priority == 0
    assert resolved(make(1, slo="fast")).priority == 7
    assert resolved(make(1, slo="fast", priority=-2)).priority == -2
    with pytest.raises(RequestError, match=r"slo = 'gold': must be one of \['fast'\]"):
        resolved(make(1, slo="gold"))


def test_a_forced_path_must_exist() -> None:
    colocated = replace(DECODE, role="colocated")
    resolved(make(1, disaggregate=True))
    resolved(make(1, disaggregate=False))
    resolved(make(1, disaggregate=True), fleet=(colocated, replace(colocated, name="e")))
    with pytest.raises(RequestError, match="no separate prefill worker"):
        resolved(make(1, disaggregate=True), fleet=(colocated,))
    with pytest.raises(RequestError, match="no decode worker of this fleet can prefill"):
        resolved(make(1, disaggregate=False), fleet=(PREFILL, replace(DECODE, can_prefill=False)))


def test_prefixes_of_short_and_long_longrope_sequences_are_kept_apart() -> None:
    """By all that the sequence may come to hold, so that a replay chooses as the first attempt."""
    limits = replace(LIMITS, short_context=32)

    def salt(num_prompt_tokens: int, max_tokens: int, **fields: object) -> str | None:
        return resolved(make(num_prompt_tokens, max_tokens, **fields), limits).request.cache_salt

    assert salt(20, 12) == salt(31, 1) == "short:"
    assert salt(20, 13) == salt(33, 1) == "long:"
    assert salt(20, 12, cache_salt="long:") == "short:long:"
    assert resolved(make(33, 1, cache_salt="mine")).request.cache_salt == "mine"

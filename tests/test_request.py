"""Sampling parameters and requests: what is refused, by name."""

import math

import pytest

from jpd.errors import RequestError
from jpd.request import MAX_STOP_TOKEN_IDS, Request, RequestState, SamplingParams, Timeline


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", (1 << 31) + 1),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e308),
        ("temperature", "0.5"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", -math.inf),
        ("seed", 1 << 63),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", ("a", "")),
        ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
    ],
)
def test_e13_a_wrong_value_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = ")


def test_a_number_that_is_too_large_is_told_the_upper_bound() -> None:
    with pytest.raises(RequestError, match=f"between 1 and {1 << 31}"):
        SamplingParams(max_tokens=1 << 63)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": None},
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1},
        {"top_k": 0},
        {"min_p": 1.0},
        {"seed": 0},
        {"seed": -(1 << 63)},
        {"stop": ()},
        {"min_tokens": 3, "max_tokens": 3},
        {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS))},
    ],
)
def test_borders_are_allowed(values: dict) -> None:
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens = 4: must not exceed max_tokens = 3"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(str(RequestError("prompt", "x" * 10_000, "is too long"))) < 120


def test_a_request_counts_its_prompt_and_cannot_be_changed() -> None:
    request = Request("r", (1, 2, 3), SamplingParams(), arrival_time=0.0, deadline=1.0)
    assert request.num_prompt_tokens == 3
    with pytest.raises(AttributeError):
        request.priority = 5  # type: ignore[misc]


def test_timelines_do_not_share_their_path() -> None:
    first, second = Timeline(), Timeline()
    first.path.append("disaggregated")
    assert second.path == []


def test_states_are_the_eight_of_the_glossary() -> None:
    names = "WAITING RESERVED PREFILLING TRANSFERRING DECODING FINISHED CANCELLED FAILED"
    assert [state.name for state in RequestState] == names.split()

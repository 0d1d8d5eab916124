"""Keyword arguments of the Python API → GenerateJob.

Knows names and types, no server. Called by `jpd.api`; the rules of values are those of every door,
in `job` and `prompts`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypedDict

from jpd.frontend.job import SAMPLING_NAMES, GenerateJob, read_sampling
from jpd.frontend.prompts import read_prompts

PromptLike = str | Sequence[int]
"""A text, or token ids."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of generate and stream; absent ones take the model's or jpd's defaults.

    Log-probabilities come as `jpd.TokenLogprobs`: `Generation.logprobs` has one for each
    of its token_ids, `Generation.prompt_logprobs` one for each prompt token, None for the first.
    Each holds the n best tokens in order, n from 0 to 20, from the model's own logits: before bias,
    penalties and temperature.
    """

    max_tokens: int | None  # None: as many as the context holds
    min_tokens: int
    temperature: float  # 0: greedy
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float  # of tokens of prompt and output; 1: off
    presence_penalty: float  # of tokens of the output, once; -2 to 2
    frequency_penalty: float  # of tokens of the output, for each time; -2 to 2
    logit_bias: Mapping[int, float] | None  # token id → -100 to 100, at most 300 of them
    logprobs: int | None  # alternatives beside each output token; None: no log-probabilities
    prompt_logprobs: int | None  # the same for the prompt; its cached prefix is not used then
    seed: int | None  # choice i of n uses seed + i
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    response_format: Mapping[str, object] | None  # as OpenAI has it: text, json_object, json_schema
    structured_outputs: Mapping[str, object] | None  # one of json, regex, choice, json_object
    guided_json: Mapping[str, object] | str | None  # a JSON schema
    guided_regex: str | None  # the whole answer matches it
    guided_choice: Sequence[str] | None  # the answer is one of these
    num_speculative_tokens: int  # drafts that a step verifies; changes no token
    n: int  # choices for each prompt
    echo: bool  # the text of a choice begins with its prompt
    include_stop_str_in_output: bool
    session_id: str | None  # turns of one session prefer the worker that holds their prefix
    cache_salt: str | None  # prefixes are shared only within a salt
    prefill_worker: str | None  # must be this one
    decode_worker: str | None
    priority: int  # higher goes first
    slo: str | None  # name of an [[slo]] of the mesh file
    timeout_seconds: float | None
    disaggregate: bool | None  # force prefill apart, or on the decode worker; None: the router's


def read_options(
    prompts: PromptLike | Sequence[PromptLike],
    options: GenerateOptions,
    default_sampling: Mapping[str, object],
) -> GenerateJob:
    """Raises RequestError for a wrong value, TypeError for an unknown name."""
    sampling = {
        name: value
        for name, value in options.items()
        if name in SAMPLING_NAMES and value is not None
    }
    rest = {name: value for name, value in options.items() if name not in SAMPLING_NAMES}
    known = {field.name for field in dataclasses.fields(GenerateJob)}
    for name in rest:
        if name not in known - {"prompts", "sampling", "arrival_time", "tools"}:
            raise TypeError(f"{name!r} is not an argument of generate or stream")
    return GenerateJob(
        prompts=read_prompts(prompts, max_prompts=None),
        sampling=read_sampling(sampling, default_sampling),
        **rest,  # type: ignore[arg-type]
    )

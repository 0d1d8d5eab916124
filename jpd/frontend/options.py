"""Keyword arguments of the Python API → GenerateJob, or ChatAsk.

Knows names and types, no server. Called by `jpd.api`; the rules of values are those of every door,
in `job` and `prompts`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from jpd.errors import RequestError
from jpd.frontend.job import SAMPLING_NAMES, GenerateJob, read_sampling
from jpd.frontend.messages import ChatMessage, read_messages
from jpd.frontend.prompts import Prompt, ServedModel, read_prompts
from jpd.frontend.tool_fields import ToolRequest, read_tool_request, with_grammar

PromptLike = str | Sequence[int]
"""A text, or token ids."""

_NO_OPTIONS = ("prompts", "sampling", "arrival_time", "tools", "trace_context", "request_id")
"""Fields of a job that are made here, not given."""


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
    skip_special_tokens: bool  # in the text shown; True, but False with tools
    add_special_tokens: bool  # to the prompt; True for a text, False for chat


class ChatOptions(GenerateOptions, total=False):
    """Keyword arguments of chat: those of generate, but for echo, and these."""

    tools: Sequence[Mapping[str, object]] | None  # functions, as OpenAI's API has them
    tool_choice: str | Mapping[str, object] | None  # none, auto, required, or one of them by name
    parallel_tool_calls: bool  # False: one call at most
    add_generation_prompt: bool  # False: the last message is to be continued


def read_options(
    prompts: PromptLike | Sequence[PromptLike],
    options: GenerateOptions,
    default_sampling: Mapping[str, object],
) -> GenerateJob:
    """Raises RequestError for a wrong value, TypeError for an unknown name."""
    return _read_job(read_prompts(prompts, max_prompts=None), options, default_sampling)


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """A chat whose prompt is not rendered yet: `job` is all the rest."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool
    tools: ToolRequest | None
    job: GenerateJob

    def after(self, earlier: Sequence[ChatMessage]) -> "ChatAsk":
        """The same, at the end of a conversation."""
        return dataclasses.replace(self, messages=(*earlier, *self.messages))


def read_chat_options(
    messages: Sequence[Mapping[str, object]], options: ChatOptions, model: ServedModel
) -> ChatAsk:
    """Raises RequestError for a wrong value, TypeError for an unknown name."""
    rest = dict(options)
    tools = read_tool_request(
        rest.pop("tools", None),
        rest.pop("tool_choice", None),
        rest.pop("parallel_tool_calls", None) is not False,
        model,
    )
    begins_answer = rest.pop("add_generation_prompt", True) is not False
    if rest.pop("echo", False):
        raise RequestError("echo", True, "is for prompts, not for chat")
    rest.setdefault("add_special_tokens", False)
    if tools is not None:  # calls are found by marks that are special tokens of some models
        rest["skip_special_tokens"] = False
    job = _read_job((), rest, model.default_sampling)
    job = dataclasses.replace(
        job,
        sampling=with_grammar(job.sampling, tools),
        tools=None if tools is None else tools.use,
    )
    return ChatAsk(read_messages(messages), begins_answer, tools, job)


def _read_job(
    prompts: tuple[Prompt, ...],
    options: Mapping[str, object],
    default_sampling: Mapping[str, object],
) -> GenerateJob:
    sampling = {
        name: value
        for name, value in options.items()
        if name in SAMPLING_NAMES and value is not None
    }
    rest = {name: value for name, value in options.items() if name not in SAMPLING_NAMES}
    known = {field.name for field in dataclasses.fields(GenerateJob)}
    for name in rest:
        if name not in known - {*_NO_OPTIONS}:
            raise TypeError(f"{name!r} is not an argument of generate, stream or chat")
    return GenerateJob(
        prompts=prompts,
        sampling=read_sampling(sampling, default_sampling),
        **rest,  # type: ignore[arg-type]
    )

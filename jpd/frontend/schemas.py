"""Bodies of the HTTP API, as pydantic reads them and as /openapi.json shows them.

Types are strict: "5", 1.5 and true are no integers. Ranges, NaN and everything that needs the model
are checked in `job` and `prompts`, with the same words as for gRPC and Python.
Fields not named here are allowed; `refusals` decides which of them must not be ignored.
"""

from pydantic import BaseModel, ConfigDict, Field

from jpd.errors import RequestError
from jpd.frontend.job import MAX_CHOICES_PER_PROMPT, MAX_PRIORITY, SAMPLING_NAMES
from jpd.frontend.schema_parts import (
    GuidedChoiceField,
    GuidedJsonField,
    LogitBiasField,
    MaybeMessagesField,
    MessagesField,
    PromptField,
    ResponseFormatField,
    StopField,
    StopTokenIdsField,
    StructuredOutputsField,
    TokensField,
    ToolChoiceField,
    ToolsField,
    name,
    number,
)
from jpd.request import MAX_SPECULATIVE_TOKENS, MAX_TOKENS, MAX_TOP_K, MAX_TOP_LOGPROBS

_SEEDS = 1 << 63


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Body):
    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={"additionalProperties": {"enum": [False, None]}},
    )

    include_usage: bool | None = None


class GenerationBody(_Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="absent: the model that is served")
    max_tokens: int | None = number(1, MAX_TOKENS)
    min_tokens: int | None = number(0, MAX_TOKENS, "no end before that many; at most max_tokens")
    temperature: float | None = number(0, 100, "1 unless given; 0 is greedy")
    top_p: float | None = number(1e-6, 1, "1: off")
    top_k: int | None = number(-1, MAX_TOP_K, "0 or -1: off")
    min_p: float | None = number(0, 1, "0: off")
    repetition_penalty: float | None = number(0.01, 100, "of prompt and output; 1: off")
    presence_penalty: float | None = number(-2, 2, "of the output; 0: off")
    frequency_penalty: float | None = number(-2, 2, "of the output; 0: off")
    logit_bias: LogitBiasField = None
    prompt_logprobs: int | None = number(0, MAX_TOP_LOGPROBS, "alternatives for each prompt token")
    seed: int | None = number(-_SEEDS, _SEEDS - 1, "choice i of n uses seed + i")
    n: int | None = number(1, MAX_CHOICES_PER_PROMPT, "choices for each prompt; 1 unless given")
    stop: StopField = None
    stop_token_ids: StopTokenIdsField = None
    ignore_eos: bool | None = None
    response_format: ResponseFormatField = None
    structured_outputs: StructuredOutputsField = None
    guided_json: GuidedJsonField = None
    guided_regex: str | None = Field(None, description="the whole answer matches it")
    guided_choice: GuidedChoiceField = None
    num_speculative_tokens: int | None = number(
        0, MAX_SPECULATIVE_TOKENS, "drafts that a step verifies; changes no token. 0 unless given"
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="to the prompt; absent: true for completions, false for chat"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = name("or the header X-Session-Id")
    cache_salt: str | None = name("prefixes are shared only within a salt")
    prefill_worker: str | None = name("must be this one")
    decode_worker: str | None = name("must be this one")
    priority: int | None = number(-MAX_PRIORITY, MAX_PRIORITY, "higher goes first")
    slo: str | None = Field(None, description="name of an [[slo]] of the mesh file")
    include_details: bool | None = Field(None, description="a timeline in each choice")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description='tokens of logprobs as "token_id:5"'
    )

    def sampling_fields(self) -> dict[str, object]:
        """The sampling fields that were given; null counts as absent."""
        values: dict[str, object] = {name: getattr(self, name, None) for name in SAMPLING_NAMES}
        if values["top_k"] == -1:
            values["top_k"] = 0
        return {name: value for name, value in values.items() if value is not None}


class CompletionBody(GenerationBody):
    prompt: PromptField
    max_tokens: int | None = number(1, MAX_TOKENS, "16 unless given, as OpenAI has it")
    echo: bool | None = None
    logprobs: int | None = number(0, MAX_TOP_LOGPROBS, "alternatives for each token")

    def sampling_fields(self) -> dict[str, object]:
        """With echo the prompt's log-probabilities belong to the answer."""
        fields = super().sampling_fields()
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return fields


class ChatBody(GenerationBody):
    messages: MessagesField
    max_tokens: int | None = number(1, MAX_TOKENS, "as many as the context holds unless given")
    max_completion_tokens: int | None = number(1, MAX_TOKENS, "another name of max_tokens")
    add_generation_prompt: bool | None = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    logprobs: bool | None = None
    top_logprobs: int | None = number(0, MAX_TOP_LOGPROBS, "with logprobs: alternatives")

    def sampling_fields(self) -> dict[str, object]:
        fields = super().sampling_fields()
        asked = self.max_completion_tokens
        if asked is not None and fields.setdefault("max_tokens", asked) != asked:
            rule = f"differs from max_tokens = {self.max_tokens}; give one of them"
            raise RequestError("max_completion_tokens", asked, rule)
        num_top = self.top_logprobs or 0
        if not 0 <= num_top <= MAX_TOP_LOGPROBS:
            rule = f"must be between 0 and {MAX_TOP_LOGPROBS}"
            raise RequestError("top_logprobs", num_top, rule)
        if num_top and not self.logprobs:
            raise RequestError("top_logprobs", num_top, "needs logprobs = true")
        without = {name: value for name, value in fields.items() if name != "logprobs"}
        return without | ({"logprobs": num_top} if self.logprobs else {})


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = Field(None, description="this or messages")
    messages: MaybeMessagesField = None
    tools: ToolsField = None
    add_special_tokens: bool | None = Field(None, description="true for prompt unless given")
    add_generation_prompt: bool | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: TokensField

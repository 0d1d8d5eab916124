"""Bodies of the HTTP API, as pydantic reads them and as /openapi.json shows them.

Types are strict: "5", 1.5 and true are no integers. Ranges, NaN and everything that needs the model
are checked in `job` and `prompts`, with the same words as for gRPC and Python.
Fields not named here are allowed; `refusals` decides which of them must not be ignored.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from jpd.errors import RequestError
from jpd.frontend.job import SAMPLING_NAMES
from jpd.request import MAX_TOP_LOGPROBS

_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}

PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}],
            "description": "A text, token ids, or a list of texts or of lists of token ids.",
        }
    ),
]
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
        {"type": "null", "description": "of an assistant that called tools"},
    ]
}
_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "JSON"},
            },
        },
    },
}
MessagesField = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": _CONTENT,
                    "name": {"type": "string"},
                    "tool_calls": {"type": "array", "items": _CALL},
                    "tool_call_id": {"type": "string", "description": "of a tool's answer"},
                },
            },
        }
    ),
]
ToolsField = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string"},
                            "description": {"type": "string"},
                            "parameters": {"type": "object", "description": "A JSON schema."},
                        },
                    },
                },
            },
        }
    ),
]
ToolChoiceField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}},
                        },
                    },
                },
            ],
            "description": "auto unless given; required and a function by name hold by a grammar",
        }
    ),
]
StopField = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS]})]
IdsField = Annotated[Any, WithJsonSchema(_IDS)]
_JSON_SCHEMA = {"type": "object", "description": "A JSON schema."}
_JSON_OR_TEXT = {"anyOf": [_JSON_SCHEMA, {"type": "string", "description": "Its JSON."}]}
ResponseFormatField = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {"name": {"type": "string"}, "schema": _JSON_SCHEMA},
                },
            },
        }
    ),
]
StructuredOutputsField = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "description": "One of these.",
            "properties": {
                "json": _JSON_OR_TEXT,
                "regex": {"type": "string"},
                "choice": _TEXTS,
                "json_object": {"type": "boolean"},
            },
        }
    ),
]
GuidedJsonField = Annotated[Any, WithJsonSchema(_JSON_OR_TEXT)]
TextsField = Annotated[Any, WithJsonSchema(_TEXTS)]


LogitBiasField = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "description": "token ids → what is added to their logits",
        }
    ),
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="the field that is wrong")
    code: str


class ErrorBody(BaseModel):
    """What every error looks like, whatever the status."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is wrong, or comes too early (429)."},
    "5XX": {"model": ErrorBody, "description": "The server could not do it."},
}


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationBody(_Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="absent: the model that is served")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = Field(None, description="1 unless given; 0 is greedy")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: off")
    min_p: float | None = None
    repetition_penalty: float | None = Field(None, description="of prompt and output; 1: off")
    presence_penalty: float | None = Field(None, description="of the output; -2 to 2")
    frequency_penalty: float | None = Field(None, description="of the output; -2 to 2")
    logit_bias: LogitBiasField = None
    prompt_logprobs: int | None = Field(None, description="alternatives for each prompt token")
    seed: int | None = Field(None, description="choice i of n uses seed + i")
    n: int | None = None
    stop: StopField = None
    stop_token_ids: IdsField = None
    ignore_eos: bool | None = None
    response_format: ResponseFormatField = None
    structured_outputs: StructuredOutputsField = None
    guided_json: GuidedJsonField = None
    guided_regex: str | None = Field(None, description="the whole answer matches it")
    guided_choice: TextsField = None
    num_speculative_tokens: int | None = Field(
        None, description="drafts that a step verifies; changes no token. 0 unless given"
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="to the prompt; absent: true for completions, false for chat"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = Field(None, description="or the header X-Session-Id")
    cache_salt: str | None = Field(None, description="prefixes are shared only within a salt")
    prefill_worker: str | None = Field(None, description="must be this one")
    decode_worker: str | None = Field(None, description="must be this one")
    priority: int | None = Field(None, description="higher goes first")
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
    max_tokens: int | None = Field(None, description="16 unless given, as OpenAI has it")
    echo: bool | None = None
    logprobs: int | None = Field(None, description="alternatives for each token, 0 to 20")

    def sampling_fields(self) -> dict[str, object]:
        """With echo the prompt's log-probabilities belong to the answer."""
        fields = super().sampling_fields()
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return fields


class ChatBody(GenerationBody):
    messages: MessagesField
    max_tokens: int | None = Field(None, description="as many as the context holds unless given")
    max_completion_tokens: int | None = Field(None, description="another name of max_tokens")
    add_generation_prompt: bool | None = None
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="with logprobs: 0 to 20 alternatives")

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
    prompt: str | None = None
    messages: MessagesField = None
    tools: ToolsField = None
    add_special_tokens: bool | None = Field(None, description="true for prompt unless given")
    add_generation_prompt: bool | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: IdsField

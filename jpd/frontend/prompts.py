"""Prompts as clients send them → checked → token ids.

Knows the model's limits and its tokenizer, no router and no transport. Called by the doors
(reading) and by TextService (encoding, in a thread). Every refusal names the field and the rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jpd.errors import ModelNotFoundError, RequestError
from jpd.frontend.tool_formats import ToolFormat
from jpd.tokenizer import Tokenizer

MAX_PROMPTS = 512
"""Prompts in one HTTP request."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the doors must know about the model behind the router."""

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    short_context: int | None = None  # longrope: longer sequences have KV of another kind
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)  # of its authors
    tool_format: ToolFormat | None = None  # None: how it writes calls is not known

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is this model or absent."""
        if name is not None and name != self.name:
            raise ModelNotFoundError("model", name, f"this server serves {self.name!r}")

    def need_tokenizer(self, field: str, value: object) -> Tokenizer:
        """The tokenizer, or a RequestError that says why `field` cannot be used."""
        if self.tokenizer is None:
            rule = (
                f"the checkpoint of {self.name!r} has no tokenizer: send token ids instead of text"
            )
            raise RequestError(field, value, rule)
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: tuple[int, ...]
    text: str | None  # as the client sent it; None: the client sent ids


def check_text(field: str, value: object, may_be_empty: bool = True) -> str:
    """`value` as text that can be encoded. Raises RequestError for anything else."""
    if not isinstance(value, str):
        raise RequestError(field, value, "must be a string")
    if not value and not may_be_empty:
        raise RequestError(field, value, "must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        shown = value[error.start : error.end]
        raise RequestError(field, shown, "is not valid Unicode (lone surrogate)") from None
    return value


def check_token_ids(field: str, values: object, vocab_size: int) -> tuple[int, ...]:
    """`values` as ids of the vocabulary. Raises RequestError naming the first that is not."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RequestError(field, values, "must be a list of token ids")
    for position, value in enumerate(values):
        if type(value) is not int:
            raise RequestError(f"{field}[{position}]", value, "must be an integer token id")
        if not 0 <= value < vocab_size:
            rule = f"must be in the vocabulary, 0 to {vocab_size - 1}"
            raise RequestError(f"{field}[{position}]", value, rule)
    return tuple(values)


def read_prompts(
    value: object, field: str = "prompt", max_prompts: int | None = MAX_PROMPTS
) -> tuple[Prompt, ...]:
    """A text, a list of ids, or a list of either → prompts; ids are not checked here.

    A flat list of integers is one prompt. Raises RequestError when it is none of these or empty.
    """
    if isinstance(value, str):
        return (check_text(field, value, may_be_empty=False),)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise RequestError(field, value, "must be a non-empty text, token ids, or a list of those")
    if not isinstance(value[0], str | Sequence):
        return (_ids(field, value),)
    if max_prompts is not None and len(value) > max_prompts:
        raise RequestError(field, len(value), f"at most {max_prompts} prompts in one request")
    return tuple(_one(f"{field}[{index}]", item) for index, item in enumerate(value))


def _one(field: str, value: object) -> Prompt:
    if isinstance(value, str):
        return check_text(field, value, may_be_empty=False)
    if not isinstance(value, Sequence) or not value:
        raise RequestError(
            field, value, "must be a non-empty text or a non-empty list of token ids"
        )
    return _ids(field, value)


def _ids(field: str, values: Sequence[object]) -> tuple[int, ...]:
    ids: list[int] = []
    for position, value in enumerate(values):
        if type(value) is not int:
            rule = "must be an integer token id; texts and ids cannot be mixed in one list"
            raise RequestError(f"{field}[{position}]", value, rule)
        ids.append(value)
    return tuple(ids)


def encode(
    prompts: Sequence[Prompt], model: ServedModel, add_special_tokens: bool
) -> tuple[EncodedPrompt, ...]:
    """Token ids of all prompts. Slow for long texts: called in a thread. Raises RequestError."""
    many = len(prompts) > 1
    return tuple(
        _encode_one(f"prompt[{index}]" if many else "prompt", prompt, model, add_special_tokens)
        for index, prompt in enumerate(prompts)
    )


def _encode_one(
    field: str, prompt: Prompt, model: ServedModel, add_special_tokens: bool
) -> EncodedPrompt:
    if isinstance(prompt, str):
        tokenizer = model.need_tokenizer(field, prompt[:80])
        text = check_text(field, prompt, may_be_empty=False)
        encoded = EncodedPrompt(tuple(tokenizer.encode(text, add_special_tokens)), text)
        if max(encoded.token_ids, default=0) >= model.vocab_size:
            raise RequestError(
                field, text[:80], "holds a token that the model has no embedding for"
            )
    else:
        encoded = EncodedPrompt(check_token_ids(field, prompt, model.vocab_size), None)
    num_tokens = len(encoded.token_ids)
    if num_tokens == 0:
        raise RequestError(field, "", "must have at least one token")
    if num_tokens >= model.max_model_len:
        rule = f"must leave room for output: the context holds {model.max_model_len} tokens"
        raise RequestError(field, f"{num_tokens} tokens", rule)
    return encoded

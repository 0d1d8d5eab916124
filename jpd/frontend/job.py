"""A job: what one client call asks for, checked against the model.

Knows the rules of fields, no router and no transport. Built by the doors and the Python API, read
by TextService.
"""

import dataclasses
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jpd.errors import RequestError
from jpd.frontend.guided_fields import GUIDED_NAMES, read_grammar
from jpd.frontend.prompts import EncodedPrompt, Prompt, ServedModel, check_text, check_token_ids
from jpd.frontend.sequence_text import TextRules
from jpd.frontend.tool_calls import ToolUse
from jpd.request import MAX_LOGIT_BIASES, SamplingParams

SAMPLING_NAMES = (
    *(item.name for item in dataclasses.fields(SamplingParams) if item.name != "grammar"),
    *GUIDED_NAMES,
)
"""The fields that `read_sampling` takes, by the names that every door gives them."""

MAX_CHOICES_PER_PROMPT = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
STOP_RULE = "must be a string or a list of strings"
MAX_ID_CHARS = 256
MAX_PRIORITY = 1 << 20


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """One call of a client: prompts and how to continue them."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1  # choices for each prompt
    echo: bool = False  # the text of a choice begins with its prompt
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # in the text shown
    add_special_tokens: bool = True  # to text prompts; a chat template has written its own
    session_id: str | None = None
    cache_salt: str | None = None  # prefixes are shared only within a salt
    prefill_worker: str | None = None  # must be this one
    decode_worker: str | None = None
    priority: int = 0
    slo: str | None = None
    timeout_seconds: float | None = None  # from arrival; None: the server's own limit
    disaggregate: bool | None = None
    tools: ToolUse | None = None  # calls of functions are taken out of the text
    trace_context: Mapping[str, str] = field(default_factory=dict)  # W3C's, of the caller's span
    arrival_time: float = field(default_factory=time.monotonic)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # ours, never the client's


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that was checked and tokenised; choice c continues prompt c // n."""

    job: GenerateJob
    prompts: tuple[EncodedPrompt, ...]
    rules: TextRules

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.job.n

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def id_of(self, index: int) -> str:
        """The id of a choice's request: the job's own if it is the only one."""
        name = self.job.request_id
        return name if self.num_choices == 1 else f"{name}-{index}"

    def prompt_of(self, index: int) -> EncodedPrompt:
        return self.prompts[index // self.job.n]


def check_job(job: GenerateJob, model: ServedModel) -> None:
    """Raises RequestError for a field that breaks a rule whatever the prompts hold."""
    if type(job.n) is not int or not 1 <= job.n <= MAX_CHOICES_PER_PROMPT:
        raise RequestError("n", job.n, f"must be an integer between 1 and {MAX_CHOICES_PER_PROMPT}")
    if type(job.priority) is not int or abs(job.priority) > MAX_PRIORITY:
        raise RequestError("priority", job.priority, f"must be an integer within ±{MAX_PRIORITY}")
    _check_timeout(job.timeout_seconds)
    for name in ("session_id", "cache_salt", "prefill_worker", "decode_worker"):
        check_id(name, getattr(job, name))
    check_token_ids("stop_token_ids", job.sampling.stop_token_ids, model.vocab_size)
    for token_id, _ in job.sampling.logit_bias:
        if token_id >= model.vocab_size:
            rule = f"token ids must be in the vocabulary, 0 to {model.vocab_size - 1}"
            raise RequestError("logit_bias", token_id, rule)
    if job.sampling.stop:
        model.need_tokenizer("stop", job.sampling.stop)
    grammar = job.sampling.grammar
    if grammar is not None:
        model.need_tokenizer(grammar.field, grammar.text or grammar.kind)
    if not job.prompts:
        raise RequestError("prompt", job.prompts, "must not be empty")


def _check_timeout(seconds: object) -> None:
    """A client deadline that has passed is no mistake: the router answers it with DeadlineError."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise RequestError("timeout_seconds", seconds, "must be a number")
    if not math.isfinite(seconds):
        raise RequestError("timeout_seconds", seconds, "must be finite")


def check_id(name: str, value: object) -> None:
    """Raises RequestError unless it is absent or a short printable text."""
    if value is None:
        return
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise RequestError(name, value, f"must be a text of 1 to {MAX_ID_CHARS} characters")
    if not value.isprintable():
        raise RequestError(name, value, "must be printable")


def check_fits(prompt: EncodedPrompt, sampling: SamplingParams, model: ServedModel) -> None:
    """Raises RequestError when prompt and output together exceed the context."""
    num_prompt_tokens = len(prompt.token_ids)
    for name, asked in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
        if asked is not None and num_prompt_tokens + asked > model.max_model_len:
            rule = (
                f"the prompt has {num_prompt_tokens} tokens and the context holds "
                f"{model.max_model_len}, which leaves {model.max_model_len - num_prompt_tokens}"
            )
            raise RequestError(name, asked, rule)


def sampling_of_choice(sampling: SamplingParams, sample: int) -> SamplingParams:
    """Choice 0 is what n = 1 would give; each later one has a seed counted up from it.

    The prompt's log-probabilities are computed for choice 0 alone.
    """
    if sample == 0:
        return sampling
    sampling = dataclasses.replace(sampling, prompt_logprobs=None)
    if sampling.seed is None:
        return sampling
    seed = (sampling.seed + sample + (1 << 63)) % (1 << 64) - (
        1 << 63
    )  # stays a signed 64-bit integer
    return dataclasses.replace(sampling, seed=seed)


def read_sampling(
    fields: Mapping[str, object], defaults: Mapping[str, object] | None = None
) -> SamplingParams:
    """SamplingParams of the fields given, over the model's own defaults.

    Raises RequestError, also for a name it does not know.
    """
    known = {item.name for item in dataclasses.fields(SamplingParams)}
    values = {**(defaults or {}), **fields}
    grammar = read_grammar(values)
    values = {name: value for name, value in values.items() if name not in GUIDED_NAMES}
    for name in values:
        if name not in known:
            raise RequestError(name, values[name], "is not a sampling parameter")
    if "stop" in values:
        values["stop"] = _read_stops(values["stop"])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(_read_list("stop_token_ids", values["stop_token_ids"]))
    if "logit_bias" in values:
        values["logit_bias"] = _read_biases(values["logit_bias"])
    return SamplingParams(**values, grammar=grammar)  # type: ignore[arg-type]


def _read_list(name: str, value: object, rule: str = "must be a list") -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(name, value, rule)
    return value


def _read_biases(value: object) -> tuple[tuple[int, object], ...]:
    """Token ids, as integers or as JSON writes them in keys, and their numbers."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias", value, "must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIASES:
        rule = f"at most {MAX_LOGIT_BIASES} entries"
        raise RequestError("logit_bias", f"{len(value)} entries", rule)
    return tuple((_read_token_id(key), bias) for key, bias in value.items())


def _read_token_id(key: object) -> int:
    if type(key) is int:
        return key
    if isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key)) == key:
        return int(key)
    raise RequestError("logit_bias", key, "its keys must be token ids")


def _read_stops(value: object) -> tuple[str, ...]:
    """One stop string, a list of them, or None. Raises RequestError."""
    stops = [value] if isinstance(value, str) else _read_list("stop", value, STOP_RULE)
    if len(stops) > MAX_STOPS:
        raise RequestError("stop", len(stops), f"at most {MAX_STOPS} stop strings")
    for stop in stops:
        text = check_text("stop", stop, may_be_empty=False)
        if len(text) > MAX_STOP_CHARS:
            raise RequestError("stop", text, f"at most {MAX_STOP_CHARS} characters")
    return tuple(str(stop) for stop in stops)

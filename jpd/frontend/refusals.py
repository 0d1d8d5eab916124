"""Fields of the OpenAI and vLLM APIs that would change the answer and are not supported here.

Each is refused by name unless it has a value that changes nothing. Fields that no API knows are
ignored with one log line a request, as most servers do. Called by the HTTP routes.
"""

import logging
from collections.abc import Mapping

from jpd.errors import RequestError

logger = logging.getLogger("jpd.frontend")

_EMPTY: tuple[object, ...] = (None, False, "", [], {})

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "top_logprobs": (None, 0),  # of completions; chat has it
    "length_penalty": (None, 1),
    "use_beam_search": _EMPTY,
    "best_of": (None, 1),
    "suffix": (None, ""),
    "guided_grammar": _EMPTY,
    "tools": _EMPTY,  # of completions; chat has these two
    "tool_choice": (None, "none", "auto"),
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "bad_words": _EMPTY,
    "allowed_token_ids": (None,),
    "logits_processors": _EMPTY,
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "chat_template": (None,),
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _EMPTY,
    "documents": _EMPTY,
    "echo": _EMPTY,  # of chat; completions have it
}

HARMLESS = frozenset(
    (
        "user metadata store service_tier safety_identifier prompt_cache_key "
        "prompt_cache_retention parallel_tool_calls prediction"
    ).split()
)
"""Fields that do not touch the answer: ignored without a word."""

_MAX_LOGGED_NAMES = 8


def check_extra_fields(extra: Mapping[str, object] | None, path: str) -> None:
    """Raises RequestError for the first field that must not be ignored."""
    unknown: list[str] = []
    for name, value in (extra or {}).items():
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is None:
            if name not in HARMLESS:
                unknown.append(name[:40])
        elif not any(_same(value, item) for item in neutral):
            raise RequestError(name, value, "is not supported by this server")
    if unknown:
        shown = ", ".join(map(repr, unknown[:_MAX_LOGGED_NAMES]))
        logger.warning("%s: ignored %d unknown fields: %s", path, len(unknown), shown)


def _same(value: object, neutral: object) -> bool:
    """Equal, and both or neither a bool: `logprobs: 0` asks for something, `false` does not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def check_stream_options(extra: Mapping[str, object] | None) -> None:
    """Raises RequestError for an option of `stream_options` that would change the stream."""
    for name, value in (extra or {}).items():
        if value not in (None, False):
            field = f"stream_options.{name}"
            raise RequestError(field, value, "is not supported by this server")

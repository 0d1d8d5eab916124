"""Fields: a Hugging Face config.json read field by field; nothing in it goes unread.

A family asks for the fields it knows. `finish` then refuses every field that was not asked for and
is not known to be without effect on the computation, so that none is ever ignored. All faults are
gathered into one ConfigError.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jpd.errors import ConfigError, Problem

NO_EFFECT = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype use_cache auto_map return_dict
    use_return_dict torchscript tokenizer_class prefix cache_implementation name_or_path ep_size
    attn_implementation gradient_checkpointing use_bfloat16 tf_legacy_loss chunk_size_feed_forward
    initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout dropout
    classifier_dropout pretraining_tp output_attentions output_hidden_states output_router_logits
    router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux num_nextn_predict_layers
    num_mtp_layers problem_type id2label label2id num_labels finetuning_task task_specific_params
    keys_to_ignore_at_inference is_encoder_decoder is_decoder pad_token_id sep_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length min_length do_sample
    temperature top_k top_p typical_p num_beams repetition_penalty
    """.split()
)
"""Fields of training, of transformers itself, and of generation defaults."""


class Fields:
    """Typed access to one mapping.

    A wrong value is noted and replaced by something harmless, so that reading goes on to `finish`.
    """

    def __init__(self, raw: Mapping[str, Any], file: str, prefix: str = "") -> None:
        self.raw, self.file, self.prefix = raw, file, prefix
        self.problems: list[Problem] = []
        self.read: set[str] = set()

    def problem(self, key: str, value: object, rule: str) -> None:
        self.problems.append(Problem(self.file, self.prefix + key, value, rule))

    def has(self, key: str) -> bool:
        """The field is there and not null."""
        return self.raw.get(key) is not None

    def is_null(self, key: str) -> bool:
        """The field is there and null, which may mean something else than a missing one."""
        return key in self.raw and self.raw[key] is None

    def get(self, *keys: str) -> Any:
        """The first of several spellings that is there and not null; all count as read."""
        self.read.update(keys)
        return next((self.raw[key] for key in keys if self.has(key)), None)

    def _spelled(self, keys: tuple[str, ...]) -> str:
        """The spelling that the file uses."""
        return next((key for key in keys if self.has(key)), keys[0])

    def integer(self, *keys: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(*keys)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self.problem(self._spelled(keys), value, f"must be an integer, at least {low}")
            return max(low, 1)
        return value

    def number(self, *keys: str, default: float | None = None, low: float = 0.0) -> float:
        value = self.get(*keys)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problem(self._spelled(keys), value, "must be a number")
            return 1.0
        if not math.isfinite(value) or value < low:
            self.problem(self._spelled(keys), value, f"must be finite and at least {low}")
            return 1.0
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        value = self.get(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(self._spelled(keys), value, "must be true or false")
            return default
        return value

    def choice(self, *keys: str, allowed: Mapping[str, str], default: str) -> str:
        """One of the names in `allowed`, translated."""
        value = self.get(*keys)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            self.problem(self._spelled(keys), value, f"supported: {', '.join(sorted(allowed))}")
            return allowed[default]
        return allowed[value]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self.get(key)
        rule = f"must be a list of {length} positive numbers"
        if not _is_list(value) or not all(_is_number(item) and item > 0 for item in value):
            self.problem(key, value, rule)
        elif len(value) != length:
            self.problem(key, f"{len(value)} numbers", rule)
        else:
            return tuple(float(item) for item in value)
        return (1.0,) * length

    def per_layer(
        self, key: str, num_layers: int, allowed: Iterable[object]
    ) -> tuple[Any, ...] | None:
        """A list with one of the allowed items per layer, or None when the field is not there."""
        value = self.get(key)
        if value is None:
            return None
        known = list(allowed)
        if not _is_list(value) or len(value) != num_layers:
            self.problem(key, value, f"must be a list of {num_layers} items, one per layer")
            return None
        wrong = [item for item in value if item not in known]
        if wrong:
            shown = ", ".join(str(item) for item in known)
            self.problem(key, wrong[0], f"not supported for a layer; supported: {shown}")
            return None
        return tuple(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """A number or a list of numbers that are not negative, such as token ids; () when null."""
        value = self.get(key)
        items = value if _is_list(value) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in items):
            self.problem(key, value, "must be an id, not negative, or a list of them")
            return ()
        return tuple(items)

    def fixed(self, key: str, *allowed: object, rule: str = "") -> None:
        """Refuse a field unless it is one of the values the computation is made for, or null."""
        value = self.get(key)
        if value is not None and value not in allowed:
            shown = ", ".join(repr(item) for item in allowed) or "null"
            self.problem(key, value, rule or f"not supported: only {shown}")

    def refuse_unread(self) -> None:
        """Note every field that may change the computation and was not read."""
        for key, value in self.raw.items():
            known = key in self.read or key in NO_EFFECT or key.startswith(("_", "unsloth"))
            if not known and value is not None:
                rule = "not known for this architecture; it might change the computation"
                self.problem(key, value, rule)

    def finish(self) -> None:
        """Raise ConfigError with everything found."""
        self.refuse_unread()
        if self.problems:
            raise ConfigError(self.problems)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

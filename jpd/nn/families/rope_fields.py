"""Rotary settings of config.json in both spellings.

The newer one is `rope_parameters` with everything inside, the older `rope_theta` beside
`rope_scaling`; the kind is called `rope_type` or, before, `type`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jpd.nn.config import RopeConfig
from jpd.nn.families.fields import Fields

Settings: TypeAlias = dict[str, Any]  # arguments of RopeConfig


@dataclass(frozen=True, slots=True)
class RopeModel:
    """What the rotary settings depend on besides their own fields."""

    head_dim: int
    max_len: int
    theta: float = 10000.0  # where config.json names none
    partial: float = 1.0  # share of the head that rotates, likewise
    original_max_len: int = 0  # of the scaled kinds, before their own; 0: not given
    interleaved: bool = False


def read_rope(
    fields: Fields, model: RopeModel, default: Mapping[str, Any] | None = None
) -> RopeConfig:
    """The rotary embedding of a model with one for all layers; `default` where none is given."""
    model = RopeModel(
        head_dim=model.head_dim,
        max_len=model.max_len,
        theta=fields.number("rope_theta", default=model.theta, low=1.0),
        partial=fields.number("partial_rotary_factor", default=model.partial),
        original_max_len=fields.integer(
            "original_max_position_embeddings", default=model.original_max_len
        ),
        interleaved=model.interleaved,
    )
    given = fields.get("rope_scaling", "rope_parameters")
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    return parse_rope(fields, (default or {}) if given is None else given, model, name)


def parse_rope(fields: Fields, given: Any, model: RopeModel, name: str) -> RopeConfig:
    """One table of rotary parameters, called `name`. Notes in `fields` what is wrong with it."""
    if not isinstance(given, Mapping):
        fields.problem(name, given, "must be a table")
        return RopeConfig(model.theta)
    rope = Fields(given, fields.file, f"{name}.")
    kind = rope.choice("rope_type", "type", allowed=KINDS, default="default")
    theta = rope.number("rope_theta", default=model.theta, low=1.0)
    partial = rope.number("partial_rotary_factor", default=model.partial)
    rotary_dim = int(model.head_dim * partial)
    if not 0 < rotary_dim <= model.head_dim or rotary_dim % 2:
        rule = f"must turn an even number of the {model.head_dim} dims of a head"
        rope.problem("partial_rotary_factor", partial, rule)
        rotary_dim = model.head_dim
    config = RopeConfig(
        theta=theta,
        kind=kind,  # type: ignore[arg-type]
        rotary_dim=0 if rotary_dim == model.head_dim else rotary_dim,
        interleaved=model.interleaved,
        **_READERS[kind](rope, model, rotary_dim),
    )
    if not rope.problems:  # else half of the fields were read as those of another kind
        rope.refuse_unread()
    fields.problems += rope.problems
    return config


KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn", "longrope")} | {
    "su": "longrope"
}
"""Names of the kinds that are supported → RopeConfig.kind."""


def _default(rope: Fields, model: RopeModel, rotary_dim: int) -> Settings:
    return {}


def _linear(rope: Fields, model: RopeModel, rotary_dim: int) -> Settings:
    return {"factor": _factor(rope)}


def _llama3(rope: Fields, model: RopeModel, rotary_dim: int) -> Settings:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not high > low:
        rope.problem("high_freq_factor", high, f"must exceed low_freq_factor = {low}")
    return {
        "factor": _factor(rope),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_len": _original(rope, model),
    }


def _yarn(rope: Fields, model: RopeModel, rotary_dim: int) -> Settings:
    original = _original(rope, model)
    factor = _factor(rope, default=model.max_len / original)
    return {
        "factor": factor,
        "original_max_len": original,
        "beta_fast": rope.number("beta_fast", default=32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", default=1.0) or 1.0,
        "truncate": rope.flag("truncate", default=True),
        "attention_factor": _yarn_attention_factor(rope, factor),
    }


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    mscale = rope.number("mscale", default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0)
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """By how much attention is sharpened for a context stretched `factor` times."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Fields, model: RopeModel, rotary_dim: int) -> Settings:
    original = _original(rope, model)
    factor = _factor(rope, default=model.max_len / original)
    spread = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "short_factor": rope.numbers("short_factor", rotary_dim // 2),
        "long_factor": rope.numbers("long_factor", rotary_dim // 2),
        "original_max_len": original,
        "attention_factor": rope.number("attention_factor", default=spread),
    }


def _factor(rope: Fields, default: float | None = None) -> float:
    return rope.number("factor", default=default, low=1e-6)


def _original(rope: Fields, model: RopeModel) -> int:
    own = rope.integer("original_max_position_embeddings", default=model.max_len, low=2)
    return model.original_max_len or own


_READERS: dict[str, Callable[[Fields, RopeModel, int], Settings]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

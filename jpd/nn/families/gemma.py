"""Gemma 2 and Gemma 3; of Gemma 3 with vision the text decoder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jpd.nn.config import DecoderConfig, LayerConfig, RopeConfig
from jpd.nn.families.dense import (
    PRE_POST_NORMS,
    dense_tensors,
    read_sizes,
    read_sliding_layers,
    read_sliding_window,
)
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, parse_rope, read_rope
from jpd.nn.tensor_ref import TensorRef

GEMMA2_DEFAULTS = {
    "vocab_size": 256000,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def _gemma(fields: Fields, sizes: dict[str, Any], *, logits_cap: float) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    bias = fields.flag("attention_bias", default=False)
    fields.fixed("use_bidirectional_attention", False)
    scalar = fields.number("query_pre_attn_scalar", default=256.0, low=1e-6)
    return sizes | {
        "norm_offset": 1.0,
        "norm_style": "pre_post",
        "qkv_bias": bias,
        "o_bias": bias,
        "embed_scale": sizes["embed_dim"] ** 0.5,
        "attention_scale": scalar**-0.5,
        "logits_softcap": _cap(fields, "final_logit_softcapping", logits_cap),
    }


def _cap(fields: Fields, key: str, default: float) -> float:
    return fields.number(key, default=0.0 if fields.is_null(key) else default)


def read_gemma2(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, **GEMMA2_DEFAULTS)
    rope = read_rope(fields, RopeModel(sizes["head_dim"], sizes["max_len"]))
    window = read_sliding_window(fields, default=4096)
    num_layers = fields.integer("num_hidden_layers", default=26)
    sliding = read_sliding_layers(fields, num_layers, lambda i: i % 2 == 0)
    layers = tuple(LayerConfig(rope, window if slides else None) for slides in sliding)
    cap = _cap(fields, "attn_logit_softcapping", 50.0)
    shared = _gemma(fields, sizes, logits_cap=30.0)
    return DecoderConfig(family="gemma2", layers=layers, attention_softcap=cap, **shared)


def read_gemma3(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, **GEMMA3_DEFAULTS)
    num_layers = fields.integer("num_hidden_layers", default=26)
    pattern = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    sliding = read_sliding_layers(fields, num_layers, lambda i: (i + 1) % pattern != 0)
    window = read_sliding_window(fields, default=4096)
    full_rope, sliding_rope = _ropes(fields, RopeModel(sizes["head_dim"], sizes["max_len"]))
    layers = tuple(
        LayerConfig(sliding_rope, window) if slides else LayerConfig(full_rope)
        for slides in sliding
    )
    shared = _gemma(fields, sizes, logits_cap=0.0)
    fields.read.add("attn_logit_softcapping")  # inherited from Gemma 2, never applied
    return DecoderConfig(family="gemma3_text", layers=layers, qk_norm="head", **shared)


def _ropes(fields: Fields, model: RopeModel) -> tuple[RopeConfig, RopeConfig]:
    """Rotary settings of the full and of the sliding layers; `rope_scaling` is of the full ones."""
    given, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or not isinstance(scaling, Mapping):
        fields.problem("rope_parameters", given, "must be a table, as must rope_scaling")
        given, scaling = {}, {}
    for key in set(given) - {FULL, SLIDING}:
        fields.problem("rope_parameters", key, f"must hold only {FULL} and {SLIDING}")
    theta = fields.number("rope_theta", default=1e6, low=1.0)
    local_theta = fields.number("rope_local_base_freq", default=1e4, low=1.0)
    full = {**(given.get(FULL) or {}), **scaling}
    sliding = given.get(SLIDING) or {}
    return (
        parse_rope(fields, full, replace(model, theta=theta), FULL),
        parse_rope(fields, sliding, replace(model, theta=local_theta), SLIDING),
    )


def read_gemma3_vision(fields: Fields) -> DecoderConfig:
    """The text decoder of a model with a vision tower, which is not served."""
    fields.read.update(VISION_FIELDS)
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        fields.problem("text_config", text, "must be a table")
        text = {}
    inner = Fields(text, fields.file, "text_config.")
    config = read_gemma3(inner)
    inner.refuse_unread()
    fields.problems += inner.problems
    eos, bos = fields.ids("eos_token_id"), fields.ids("bos_token_id")
    return replace(
        config,
        family="gemma3",
        tied_embeddings=fields.flag("tie_word_embeddings", default=config.tied_embeddings),
        eos_token_ids=eos or config.eos_token_ids,
        bos_token_id=bos[0] if bos else config.bos_token_id,
    )


VISION_FIELDS = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
)


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return dense_tensors(config, PRE_POST_NORMS)


def vision_tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return {
        path: replace(ref, names=tuple(f"language_model.{name}" for name in ref.names))
        for path, ref in tensors(config).items()
    }


GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), read_gemma2, tensors)
GEMMA3 = Family("gemma3_text", ("Gemma3ForCausalLM",), read_gemma3, tensors)
GEMMA3_VISION = Family(
    "gemma3", ("Gemma3ForConditionalGeneration",), read_gemma3_vision, vision_tensors
)

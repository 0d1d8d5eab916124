"""Mistral, Ministral (sliding and full layers mixed) and Mixtral."""

from typing import Any

from jpd.nn.config import DecoderConfig, LayerConfig, MoeConfig
from jpd.nn.families.dense import (
    PRE_NORMS,
    dense_tensors,
    read_sizes,
    read_sliding_layers,
    read_sliding_window,
)
from jpd.nn.families.experts import (
    MIXTRAL_NAMES,
    expert_tensors,
    moe_decoder_tensors,
    router_tensor,
)
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, read_rope
from jpd.nn.tensor_ref import TensorRef

MAX_LEN = 131072


def _sizes(fields: Fields, **defaults: Any) -> dict[str, Any]:
    return read_sizes(fields, num_key_value_heads=8, max_position_embeddings=MAX_LEN, **defaults)


def read_mistral(fields: Fields) -> DecoderConfig:
    sizes = _sizes(fields)
    rope = read_rope(fields, RopeModel(sizes["head_dim"], sizes["max_len"]))
    layer = LayerConfig(rope, sliding_window=read_sliding_window(fields, default=4096))
    layers = (layer,) * fields.integer("num_hidden_layers")
    return DecoderConfig(family="mistral", layers=layers, **sizes)


def read_ministral(fields: Fields) -> DecoderConfig:
    sizes = _sizes(fields)
    rope = read_rope(fields, RopeModel(sizes["head_dim"], sizes["max_len"]))
    window = read_sliding_window(fields, default=4096)
    num_layers = fields.integer("num_hidden_layers")
    layers = tuple(
        LayerConfig(rope, sliding_window=window if slides else None)
        for slides in read_sliding_layers(fields, num_layers, lambda i: window is not None)
    )
    return DecoderConfig(family="ministral", layers=layers, **sizes)


def read_mixtral(fields: Fields) -> DecoderConfig:
    sizes = _sizes(fields, rms_norm_eps=1e-5)
    moe = MoeConfig(
        num_experts=fields.integer("num_local_experts", default=8),
        num_experts_per_token=fields.integer("num_experts_per_tok", default=2),
        expert_mlp_dim=sizes["mlp_dim"],
        router="softmax_topk",
    )
    rope = read_rope(fields, RopeModel(sizes["head_dim"], sizes["max_len"], theta=1e6))
    layer = LayerConfig(rope, read_sliding_window(fields, default=None), moe)
    layers = (layer,) * fields.integer("num_hidden_layers")
    return DecoderConfig(family="mixtral", layers=layers, **sizes)


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return dense_tensors(config, PRE_NORMS)


def _moe_tensors(
    config: DecoderConfig, moe: MoeConfig, path: str, name: str
) -> dict[str, TensorRef]:
    refs = router_tensor(config, moe, path, f"{name}.block_sparse_moe.gate")
    return refs | expert_tensors(config, moe, path, name, MIXTRAL_NAMES)


def mixtral_tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return moe_decoder_tensors(config, _moe_tensors)


MISTRAL = Family("mistral", ("MistralForCausalLM",), read_mistral, tensors)
MINISTRAL = Family("ministral", ("MinistralForCausalLM",), read_ministral, tensors)
MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), read_mixtral, mixtral_tensors)

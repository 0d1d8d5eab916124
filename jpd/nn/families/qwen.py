"""Qwen 2 and 2.5, Qwen 3, Qwen 3 mixture of experts."""

from jpd.nn.config import DecoderConfig, LayerConfig, MoeConfig
from jpd.nn.families.dense import (
    PRE_NORMS,
    dense_tensors,
    read_sizes,
    read_sliding_layers,
    read_sliding_window,
)
from jpd.nn.families.experts import (
    LLAMA_NAMES,
    expert_tensors,
    moe_decoder_tensors,
    router_tensor,
)
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, read_rope
from jpd.nn.tensor_ref import TensorRef

MAX_LEN = 32768


def _window(fields: Fields) -> int | None:
    window = read_sliding_window(fields, default=4096)
    return window if fields.flag("use_sliding_window", default=False) else None


def _dense_layers(fields: Fields, model: RopeModel) -> tuple[LayerConfig, ...]:
    """Layers from `max_window_layers` on slide, unless `layer_types` says otherwise."""
    rope, window = read_rope(fields, model), _window(fields)
    first = fields.integer("max_window_layers", default=28, low=0)
    num_layers = fields.integer("num_hidden_layers")
    sliding = read_sliding_layers(fields, num_layers, lambda i: i >= first)
    return tuple(LayerConfig(rope, window if slides else None) for slides in sliding)


def read_qwen2(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, num_key_value_heads=32, max_position_embeddings=MAX_LEN)
    layers = _dense_layers(fields, RopeModel(sizes["head_dim"], sizes["max_len"]))
    fields.fixed("use_mrope", False)
    return DecoderConfig(family="qwen2", layers=layers, qkv_bias=True, **sizes)


def read_qwen3(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(
        fields, num_key_value_heads=32, head_dim=128, max_position_embeddings=MAX_LEN
    )
    bias = fields.flag("attention_bias", default=False)
    layers = _dense_layers(fields, RopeModel(sizes["head_dim"], sizes["max_len"]))
    return DecoderConfig(
        family="qwen3", layers=layers, qk_norm="head", qkv_bias=bias, o_bias=bias, **sizes
    )


def read_qwen3_moe(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(
        fields, num_key_value_heads=4, intermediate_size=6144, max_position_embeddings=MAX_LEN
    )
    bias = fields.flag("attention_bias", default=False)
    rope = read_rope(fields, RopeModel(sizes["head_dim"], sizes["max_len"]))
    window = _window(fields)
    fields.read.add("max_window_layers")  # all layers slide or none does
    moe = MoeConfig(
        num_experts=fields.integer("num_experts", "num_local_experts", default=128),
        num_experts_per_token=fields.integer("num_experts_per_tok", default=8),
        expert_mlp_dim=fields.integer("moe_intermediate_size", default=768),
        router="softmax_topk",
        normalize_weights=fields.flag("norm_topk_prob", default=False),
    )
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.ids("mlp_only_layers")
    layers = tuple(
        LayerConfig(rope, window, None if i in dense or (i + 1) % step else moe)
        for i in range(fields.integer("num_hidden_layers"))
    )
    return DecoderConfig(
        family="qwen3_moe", layers=layers, qk_norm="head", qkv_bias=bias, o_bias=bias, **sizes
    )


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return dense_tensors(config, PRE_NORMS)


def _moe_tensors(
    config: DecoderConfig, moe: MoeConfig, path: str, name: str
) -> dict[str, TensorRef]:
    refs = router_tensor(config, moe, path, f"{name}.mlp.gate")
    return refs | expert_tensors(config, moe, path, name, LLAMA_NAMES)


def moe_tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return moe_decoder_tensors(config, _moe_tensors)


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), read_qwen2, tensors)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), read_qwen3, tensors)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), read_qwen3_moe, moe_tensors)

"""What nearly all families share: the common fields of config.json and the usual tensor names."""

from collections.abc import Callable, Mapping
from typing import Any

from jpd.nn.config import Activation, DecoderConfig
from jpd.nn.families.fields import Fields
from jpd.nn.tensor_ref import TensorRef, linear, linear_from, matrix, vector

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}

PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PRE_POST_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
POST_NORMS = {
    "post_attn_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def read_sizes(fields: Fields, **defaults: Any) -> dict[str, Any]:
    """Arguments of DecoderConfig that every family has.

    `defaults`: what the family means by a missing field. Whatever they say, a null
    num_key_value_heads is num_attention_heads and a null head_dim is derived.
    """

    def integer(key: str, derived: int | None = None) -> int:
        default = derived if fields.is_null(key) else defaults.get(key, derived)
        return fields.integer(key, default=default)

    num_heads, embed_dim = integer("num_attention_heads"), integer("hidden_size")
    head_dim = integer("head_dim", derived=max(1, embed_dim // num_heads))
    bos = fields.ids("bos_token_id")
    return {
        "vocab_size": integer("vocab_size"),
        "embed_dim": embed_dim,
        "mlp_dim": integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": integer("num_key_value_heads", derived=num_heads),
        "head_dim": head_dim,
        "max_len": integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", default=defaults.get("rms_norm_eps", 1e-6)),
        "activation": fields.choice(
            "hidden_activation",
            "hidden_act",
            allowed=ACTIVATIONS,
            default=defaults.get("hidden_act", "silu"),
        ),
        "tied_embeddings": fields.flag(
            "tie_word_embeddings", default=defaults.get("tie_word_embeddings", False)
        ),
        "attention_scale": head_dim**-0.5,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": fields.ids("eos_token_id"),
    }


def read_sliding_window(fields: Fields, default: int | None) -> int | None:
    """A sliding window's width; null means that there is none."""
    if not fields.has("sliding_window"):
        fields.read.add("sliding_window")
        return None if fields.is_null("sliding_window") else default
    return fields.integer("sliding_window")


def read_sliding_layers(
    fields: Fields, num_layers: int, default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """For each layer whether its attention slides: `layer_types`, or the family's own rule."""
    kinds = fields.per_layer("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        return tuple(default(i) for i in range(num_layers))
    return tuple(kind == "sliding_attention" for kind in kinds)


def dense_tensors(config: DecoderConfig, norms: Mapping[str, str]) -> dict[str, TensorRef]:
    """A decoder with plain attention and dense MLPs. `norms`: our name → theirs, in each layer."""
    refs = outer_tensors(config)
    for i in range(config.num_layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        refs |= attention_tensors(config, f"{path}.attn", f"{name}.self_attn")
        refs |= mlp_tensors(config, f"{path}.mlp", f"{name}.mlp")
        refs |= norm_tensors(config, path, name, norms)
    return refs


def outer_tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    """Embedding, last norm and, when it is not tied, the head."""
    table = (config.vocab_size, config.embed_dim)
    refs = {
        "embed.weight": matrix("model.embed_tokens.weight", table),
        "final_norm.weight": vector("model.norm.weight", (config.embed_dim,)),
    }
    if not config.tied_embeddings:
        refs["head.weight"] = matrix("lm_head.weight", table)
    return refs


def norm_tensors(
    config: DecoderConfig, path: str, name: str, norms: Mapping[str, str]
) -> dict[str, TensorRef]:
    return {
        f"{path}.{ours}.weight": vector(f"{name}.{theirs}.weight", (config.embed_dim,))
        for ours, theirs in norms.items()
    }


def attention_tensors(config: DecoderConfig, path: str, name: str) -> dict[str, TensorRef]:
    embed, k_dims = config.embed_dim, (config.num_kv_heads, config.head_dim)
    q_dims = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    refs = {
        f"{path}.q.weight": linear(f"{name}.q_proj.weight", embed, q_dims),
        f"{path}.k.weight": linear(f"{name}.k_proj.weight", embed, k_dims),
        f"{path}.v.weight": linear(f"{name}.v_proj.weight", embed, k_dims),
        f"{path}.o.weight": linear_from(f"{name}.o_proj.weight", q_dims, embed),
    }
    if config.qkv_bias:
        for letter, dims in (("q", q_dims), ("k", k_dims), ("v", k_dims)):
            refs[f"{path}.{letter}_bias"] = vector(f"{name}.{letter}_proj.bias", dims)
    if config.o_bias:
        refs[f"{path}.o_bias"] = vector(f"{name}.o_proj.bias", (embed,))
    if config.attention_sinks:
        refs[f"{path}.sinks"] = vector(f"{name}.sinks", q_dims[:2])
    if config.qk_norm != "none":
        skip = 0 if config.qk_norm == "full" else -1
        refs[f"{path}.q_norm.weight"] = vector(f"{name}.q_norm.weight", q_dims[skip:])
        refs[f"{path}.k_norm.weight"] = vector(f"{name}.k_norm.weight", k_dims[skip:])
    return refs


def mlp_tensors(
    config: DecoderConfig, path: str, name: str, *, mlp_dim: int = 0
) -> dict[str, TensorRef]:
    embed, mlp = config.embed_dim, mlp_dim or config.mlp_dim
    refs = {
        f"{path}.gate.weight": linear(f"{name}.gate_proj.weight", embed, (mlp,)),
        f"{path}.up.weight": linear(f"{name}.up_proj.weight", embed, (mlp,)),
        f"{path}.down.weight": linear(f"{name}.down_proj.weight", mlp, (embed,)),
    }
    if config.mlp_bias:
        for letter, dim in (("gate", mlp), ("up", mlp), ("down", embed)):
            refs[f"{path}.{letter}_bias"] = vector(f"{name}.{letter}_proj.bias", (dim,))
    return refs

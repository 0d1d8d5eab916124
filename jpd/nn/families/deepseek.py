"""DeepSeek V3: latent attention, experts chosen within groups, experts that all tokens share."""

from dataclasses import replace
from typing import Any

from jpd.nn.config import DecoderConfig, LayerConfig, MlaConfig, MoeConfig
from jpd.nn.families.dense import mlp_tensors, read_sizes
from jpd.nn.families.experts import (
    LLAMA_NAMES,
    expert_tensors,
    moe_decoder_tensors,
    router_tensor,
)
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, read_rope, yarn_mscale
from jpd.nn.tensor_ref import TensorRef, linear, linear_from, vector


def read_config(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, max_position_embeddings=4096)
    sizes["num_kv_heads"] = sizes["num_heads"]  # all share one latent; the field has no effect
    mla = _read_mla(fields)
    fields.fixed("qk_head_dim", mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    model = RopeModel(
        mla.qk_rope_head_dim,
        sizes["max_len"],
        interleaved=fields.flag("rope_interleave", default=True),
    )
    rope, moe = read_rope(fields, model), _read_moe(fields)
    num_dense = fields.integer("first_k_dense_replace", default=3, low=0)
    fields.fixed("moe_layer_freq", 1)
    layers = tuple(
        LayerConfig(rope, None, None if i < num_dense else moe)
        for i in range(fields.integer("num_hidden_layers"))
    )
    bias = fields.flag("attention_bias", default=False)
    sizes["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    sizes["attention_scale"] = sizes["head_dim"] ** -0.5 * _sharpening(fields)
    return DecoderConfig(
        family="deepseek_v3", layers=layers, mla=mla, qkv_bias=bias, o_bias=bias, **sizes
    )


def _read_mla(fields: Fields) -> MlaConfig:
    return MlaConfig(
        kv_lora_rank=fields.integer("kv_lora_rank", default=512),
        q_lora_rank=0
        if fields.is_null("q_lora_rank")
        else fields.integer("q_lora_rank", default=1536),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", default=128),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", default=64),
        v_head_dim=fields.integer("v_head_dim", default=128),
    )


def _read_moe(fields: Fields) -> MoeConfig:
    fields.fixed("scoring_func", "sigmoid")
    fields.fixed("topk_method", "noaux_tc")
    num_experts = fields.integer("n_routed_experts", "num_local_experts", default=256)
    groups = fields.integer("n_group", default=8)
    if num_experts % groups:
        fields.problem("n_group", groups, f"must divide n_routed_experts = {num_experts}")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=fields.integer("num_experts_per_tok", default=8),
        expert_mlp_dim=fields.integer("moe_intermediate_size", default=2048),
        router="sigmoid_group",
        normalize_weights=fields.flag("norm_topk_prob", default=True),
        routed_scale=fields.number("routed_scaling_factor", default=2.5),
        num_shared_experts=fields.integer("n_shared_experts", default=1),
        num_groups=groups,
        num_groups_per_token=fields.integer("topk_group", default=4),
        score_correction_bias=True,
    )


def _sharpening(fields: Fields) -> float:
    """Under a scaled rope, attention is sharpened by the square of yarn's mscale."""
    scaling: Any = fields.get("rope_scaling", "rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    mscale = scaling.get("mscale_all_dim") or 0.0
    if kind == "default" or not mscale:
        return 1.0
    return yarn_mscale(scaling.get("factor") or 1.0, mscale) ** 2


def _attention_tensors(config: DecoderConfig, path: str, name: str) -> dict[str, TensorRef]:
    mla, embed, heads = config.mla, config.embed_dim, config.num_heads
    assert mla is not None
    nope, value, rank = mla.qk_nope_head_dim, mla.v_head_dim, mla.kv_lora_rank
    q_dims = (heads, nope + mla.qk_rope_head_dim)
    up = TensorRef(
        (f"{name}.kv_b_proj.weight",),
        (heads * (nope + value), rank),
        ((heads, nope + value), (rank,)),
        (0, 1, 2),
    )
    refs = {
        f"{path}.kv_a.weight": linear(
            f"{name}.kv_a_proj_with_mqa.weight", embed, (rank + mla.qk_rope_head_dim,)
        ),
        f"{path}.kv_a_norm.weight": vector(f"{name}.kv_a_layernorm.weight", (rank,)),
        f"{path}.k_up.weight": replace(up, windows=((1, 0, nope),)),
        f"{path}.v_up.weight": replace(up, windows=((1, nope, nope + value),)),
        f"{path}.o.weight": linear_from(f"{name}.o_proj.weight", (heads, value), embed),
    }
    if mla.q_lora_rank:
        refs[f"{path}.q_a.weight"] = linear(f"{name}.q_a_proj.weight", embed, (mla.q_lora_rank,))
        refs[f"{path}.q_a_norm.weight"] = vector(f"{name}.q_a_layernorm.weight", (mla.q_lora_rank,))
        refs[f"{path}.q.weight"] = linear(f"{name}.q_b_proj.weight", mla.q_lora_rank, q_dims)
    else:
        refs[f"{path}.q.weight"] = linear(f"{name}.q_proj.weight", embed, q_dims)
    if config.qkv_bias:
        refs |= _bias_tensors(config, mla, path, name)
    return refs


def _bias_tensors(
    config: DecoderConfig, mla: MlaConfig, path: str, name: str
) -> dict[str, TensorRef]:
    width = mla.kv_lora_rank + mla.qk_rope_head_dim
    refs = {
        f"{path}.kv_a_bias": vector(f"{name}.kv_a_proj_with_mqa.bias", (width,)),
        f"{path}.o_bias": vector(f"{name}.o_proj.bias", (config.embed_dim,)),
    }
    if mla.q_lora_rank:
        refs[f"{path}.q_a_bias"] = vector(f"{name}.q_a_proj.bias", (mla.q_lora_rank,))
    return refs


def _moe_tensors(
    config: DecoderConfig, moe: MoeConfig, path: str, name: str
) -> dict[str, TensorRef]:
    refs = router_tensor(config, moe, path, f"{name}.mlp.gate")
    refs[f"{path}.score_correction"] = vector(
        f"{name}.mlp.gate.e_score_correction_bias", (moe.num_experts,)
    )
    refs |= expert_tensors(config, moe, path, name, LLAMA_NAMES)
    shared = moe.num_shared_experts * moe.expert_mlp_dim
    return refs | mlp_tensors(
        config, f"{path}.shared", f"{name}.mlp.shared_experts", mlp_dim=shared
    )


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return moe_decoder_tensors(config, _moe_tensors, _attention_tensors)


DEEPSEEK_V3 = Family(
    "deepseek_v3", ("DeepseekV3ForCausalLM",), read_config, tensors, has_layers_beyond=True
)

"""gpt-oss: attention sinks, alternating windows, experts with biases and a clamped activation."""

from jpd.nn.config import DecoderConfig, LayerConfig, MoeConfig
from jpd.nn.families.dense import read_sizes, read_sliding_layers, read_sliding_window
from jpd.nn.families.experts import moe_decoder_tensors, router_tensor
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, read_rope
from jpd.nn.tensor_ref import TensorRef, vector

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(
        fields,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )
    fields.fixed("hidden_act", "silu")
    model = RopeModel(sizes["head_dim"], sizes["max_len"], theta=150000.0)
    rope = read_rope(fields, model, DEFAULT_ROPE)
    window = read_sliding_window(fields, default=128)
    num_layers = fields.integer("num_hidden_layers")
    bias = fields.flag("attention_bias", default=True)
    moe = MoeConfig(
        num_experts=fields.integer("num_local_experts", default=128),
        num_experts_per_token=fields.integer("num_experts_per_tok", "experts_per_token", default=4),
        expert_mlp_dim=sizes["mlp_dim"],
        router="topk_softmax",
        router_bias=True,
        expert_bias=True,
        clamped_swiglu=fields.number("swiglu_limit", default=7.0, low=1e-6),
        swiglu_alpha=fields.number("swiglu_alpha", default=1.702),
    )
    fields.read.add("initial_context_length")  # stands in the rotary settings too
    layers = tuple(
        LayerConfig(rope, window if slides else None, moe)
        for slides in read_sliding_layers(fields, num_layers, lambda i: i % 2 == 0)
    )
    return DecoderConfig(
        family="gpt_oss",
        layers=layers,
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        **sizes,
    )


def _moe_tensors(
    config: DecoderConfig, moe: MoeConfig, path: str, name: str
) -> dict[str, TensorRef]:
    """Experts are stored as [E, in, out]; gate and up take turns in the columns of one tensor."""
    experts, embed, mlp = moe.num_experts, config.embed_dim, moe.expert_mlp_dim
    name = f"{name}.mlp"
    refs = router_tensor(config, moe, path, f"{name}.router")
    refs[f"{path}.router_bias"] = vector(f"{name}.router.bias", (experts,))
    for turn, half in enumerate(("gate", "up")):
        refs[f"{path}.{half}.weight"] = TensorRef(
            (f"{name}.experts.gate_up_proj",),
            (experts, embed, 2 * mlp),
            ((experts,), (embed,), (mlp, 2)),
            (0, 1, 2),
            windows=((3, turn, turn + 1),),
        )
        refs[f"{path}.{half}_bias"] = TensorRef(
            (f"{name}.experts.gate_up_proj_bias",),
            (experts, 2 * mlp),
            ((experts,), (mlp, 2)),
            (0, 1),
            windows=((2, turn, turn + 1),),
        )
    refs[f"{path}.down.weight"] = TensorRef(
        (f"{name}.experts.down_proj",),
        (experts, mlp, embed),
        ((experts,), (mlp,), (embed,)),
        (0, 1, 2),
    )
    refs[f"{path}.down_bias"] = TensorRef(
        (f"{name}.experts.down_proj_bias",), (experts, embed), ((experts,), (embed,)), (0, 1)
    )
    return refs


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return moe_decoder_tensors(config, _moe_tensors)


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), read_config, tensors)

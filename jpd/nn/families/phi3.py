"""Phi-3 and Phi-4, whose query, key and value are one tensor, as are gate and up."""

from jpd.nn.config import DecoderConfig, LayerConfig
from jpd.nn.families.dense import PRE_NORMS, dense_tensors, read_sizes, read_sliding_window
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, read_rope
from jpd.nn.tensor_ref import TensorRef, linear


def read_config(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, max_position_embeddings=4096, rms_norm_eps=1e-5)
    model = RopeModel(sizes["head_dim"], sizes["max_len"], original_max_len=4096)
    layer = LayerConfig(read_rope(fields, model), read_sliding_window(fields, default=None))
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.fixed(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        fields.fixed(key, 1)
    layers = (layer,) * fields.integer("num_hidden_layers")
    return DecoderConfig(family="phi3", layers=layers, **sizes)


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    refs = dense_tensors(config, PRE_NORMS)
    embed, kv_heads, head = config.embed_dim, config.num_kv_heads, config.head_dim
    q_rows, k_rows = config.num_heads * head, kv_heads * head
    q_dims = (kv_heads, config.num_heads // kv_heads, head)
    for i in range(config.num_layers):
        fused = f"model.layers.{i}.self_attn.qkv_proj.weight"
        first_row = 0
        for letter, dims in (("q", q_dims), ("k", q_dims[::2]), ("v", q_dims[::2])):
            refs[f"layers.{i}.attn.{letter}.weight"] = linear(
                fused, embed, dims, first_row=first_row, num_rows=q_rows + 2 * k_rows
            )
            first_row += q_rows if letter == "q" else k_rows
        fused = f"model.layers.{i}.mlp.gate_up_proj.weight"
        for n, half in enumerate(("gate", "up")):
            refs[f"layers.{i}.mlp.{half}.weight"] = linear(
                fused,
                embed,
                (config.mlp_dim,),
                first_row=n * config.mlp_dim,
                num_rows=2 * config.mlp_dim,
            )
    return refs


PHI3 = Family("phi3", ("Phi3ForCausalLM",), read_config, tensors)

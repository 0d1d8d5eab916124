"""Tensor names of mixture-of-experts layers where every expert has files of its own."""

from collections.abc import Callable

from jpd.nn.config import DecoderConfig, MoeConfig
from jpd.nn.families.dense import (
    PRE_NORMS,
    attention_tensors,
    mlp_tensors,
    norm_tensors,
    outer_tensors,
)
from jpd.nn.tensor_ref import TensorRef, linear

MoeTensors = Callable[[DecoderConfig, MoeConfig, str, str], dict[str, TensorRef]]
AttentionTensors = Callable[[DecoderConfig, str, str], dict[str, TensorRef]]

LLAMA_NAMES = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("block_sparse_moe.experts", "w1", "w3", "w2")


def moe_decoder_tensors(
    config: DecoderConfig,
    moe_tensors: MoeTensors,
    attention: AttentionTensors = attention_tensors,
) -> dict[str, TensorRef]:
    """A decoder whose layers are dense or a mixture, each as its LayerConfig says."""
    refs = outer_tensors(config)
    for i, layer in enumerate(config.layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        refs |= attention(config, f"{path}.attn", f"{name}.self_attn")
        refs |= norm_tensors(config, path, name, PRE_NORMS)
        if layer.moe is None:
            refs |= mlp_tensors(config, f"{path}.mlp", f"{name}.mlp")
        else:
            refs |= moe_tensors(config, layer.moe, f"{path}.moe", name)
    return refs


def expert_tensors(
    config: DecoderConfig, moe: MoeConfig, path: str, name: str, names: tuple[str, ...]
) -> dict[str, TensorRef]:
    """Experts stacked from one tensor each. `names`: their folder, gate, up and down."""
    folder, gate, up, down = names
    embed, mlp = config.embed_dim, moe.expert_mlp_dim

    def stacked(theirs: str, in_dim: int, out_dim: int) -> TensorRef:
        one = linear("", in_dim, (out_dim,))
        files = tuple(
            f"{name}.{folder}.{expert}.{theirs}.weight" for expert in range(moe.num_experts)
        )
        return TensorRef(files, one.file_shape, one.splits, one.order, one.starts, is_stacked=True)

    return {
        f"{path}.gate.weight": stacked(gate, embed, mlp),
        f"{path}.up.weight": stacked(up, embed, mlp),
        f"{path}.down.weight": stacked(down, mlp, embed),
    }


def router_tensor(
    config: DecoderConfig, moe: MoeConfig, path: str, name: str
) -> dict[str, TensorRef]:
    return {f"{path}.router": linear(f"{name}.weight", config.embed_dim, (moe.num_experts,))}

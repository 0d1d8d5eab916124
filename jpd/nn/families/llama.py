"""Llama 2, 3 and 3.x; SmolLM3, which is a Llama with layers that have no positions."""

from dataclasses import replace

from jpd.nn.config import DecoderConfig, LayerConfig, RopeConfig
from jpd.nn.families.dense import PRE_NORMS, dense_tensors, read_sizes, read_sliding_window
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, read_rope
from jpd.nn.tensor_ref import TensorRef


def read_llama(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields)
    attention_bias = fields.flag("attention_bias", default=False)
    layer = LayerConfig(read_rope(fields, RopeModel(sizes["head_dim"], sizes["max_len"])))
    return DecoderConfig(
        family="llama",
        layers=(layer,) * fields.integer("num_hidden_layers"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        **sizes,
    )


def read_smollm3(fields: Fields) -> DecoderConfig:
    config = read_llama(fields)
    interval = fields.integer("no_rope_layer_interval", default=4)
    turns = fields.per_layer("no_rope_layers", config.num_layers, (0, 1))  # 1: the layer has rope
    if turns is None:
        turns = tuple(int((i + 1) % interval != 0) for i in range(config.num_layers))
    window = read_sliding_window(fields, default=None)
    if not fields.flag("use_sliding_window", default=False):
        window = None
    sliding = fields.per_layer(
        "layer_types", config.num_layers, ("full_attention", "sliding_attention")
    ) or tuple("full_attention" if turn else "sliding_attention" for turn in turns)
    layers = tuple(
        LayerConfig(
            rope=layer.rope if turn else RopeConfig(kind="none"),
            sliding_window=window if kind == "sliding_attention" else None,
        )
        for layer, turn, kind in zip(config.layers, turns, sliding, strict=True)
    )
    tied = fields.flag("tie_word_embeddings", default=True)
    return replace(config, family="smollm3", layers=layers, tied_embeddings=tied)


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return dense_tensors(config, PRE_NORMS)


LLAMA = Family("llama", ("LlamaForCausalLM",), read_llama, tensors)
SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM",), read_smollm3, tensors)

"""OLMo 2: norms after attention and MLP instead of before, queries and keys normed as a whole."""

from jpd.nn.config import DecoderConfig, LayerConfig
from jpd.nn.families.dense import POST_NORMS, dense_tensors, read_sizes
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.rope_fields import RopeModel, read_rope
from jpd.nn.tensor_ref import TensorRef


def read_config(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, max_position_embeddings=2048, rms_norm_eps=1e-5)
    bias = fields.flag("attention_bias", default=False)
    layer = LayerConfig(read_rope(fields, RopeModel(sizes["head_dim"], sizes["max_len"])))
    return DecoderConfig(
        family="olmo2",
        layers=(layer,) * fields.integer("num_hidden_layers"),
        norm_style="post",
        qk_norm="full",
        qkv_bias=bias,
        o_bias=bias,
        **sizes,
    )


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return dense_tensors(config, POST_NORMS)


OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), read_config, tensors)

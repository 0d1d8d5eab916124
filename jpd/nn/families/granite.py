"""Granite: a Llama with four multipliers."""

from dataclasses import replace

from jpd.nn.config import DecoderConfig
from jpd.nn.families.dense import PRE_NORMS, dense_tensors
from jpd.nn.families.family import Family
from jpd.nn.families.fields import Fields
from jpd.nn.families.llama import read_llama
from jpd.nn.tensor_ref import TensorRef


def read_config(fields: Fields) -> DecoderConfig:
    return replace(
        read_llama(fields),
        family="granite",
        embed_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        attention_scale=fields.number("attention_multiplier", default=1.0),
        logits_scale=1.0 / fields.number("logits_scaling", default=1.0, low=1e-6),
    )


def tensors(config: DecoderConfig) -> dict[str, TensorRef]:
    return dense_tensors(config, PRE_NORMS)


GRANITE = Family("granite", ("GraniteForCausalLM",), read_config, tensors)

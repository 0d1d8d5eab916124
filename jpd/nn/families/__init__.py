"""Model families: config.json → DecoderConfig, and where their tensors are. No jax."""

from collections.abc import Mapping
from typing import Any

from jpd.errors import ConfigError, Problem
from jpd.nn.config import DecoderConfig
from jpd.nn.families import (
    deepseek,
    gemma,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
)
from jpd.nn.families.family import Family

_ALL = (
    deepseek.DEEPSEEK_V3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gemma.GEMMA3_VISION,
    gpt_oss.GPT_OSS,
    granite.GRANITE,
    llama.LLAMA,
    llama.SMOLLM3,
    mistral.MINISTRAL,
    mistral.MISTRAL,
    mistral.MIXTRAL,
    olmo.OLMO2,
    phi3.PHI3,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen.QWEN3_MOE,
)

FAMILIES: Mapping[str, Family] = {
    name: family for family in _ALL for name in (family.name, *family.architectures)
}
"""By model_type and by architecture."""


def find_family(raw: Mapping[str, Any], file: str = "config.json") -> Family:
    """The family that config.json asks for. Raises ConfigError with the list of known ones."""
    architectures = raw.get("architectures")
    key = "architectures" if architectures else "model_type"
    value = raw.get(key)
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(sorted(name for family in _ALL for name in family.architectures))
    raise ConfigError([Problem(file, key, value, f"unknown architecture; known: {known}")])


def config_from_hf(raw: Mapping[str, Any], file: str = "config.json") -> DecoderConfig:
    """Translate config.json, whatever its family. Raises ConfigError with every fault found."""
    return find_family(raw, file).to_config(raw, file)

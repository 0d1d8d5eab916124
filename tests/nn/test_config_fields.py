"""No field of any family's configuration class is ignored: read, refused, or here with its reason.

hf_config_fields.json holds the fields of the configuration classes of transformers 5.24 with their
defaults, without those that `fields.NO_EFFECT` names.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from jpd.errors import ConfigError
from jpd.nn.config import DecoderConfig
from jpd.nn.families import config_from_hf

CLASSES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "hf_config_fields.json").read_text()
)

BASES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 64},
    "qwen3": {"use_sliding_window": True, "sliding_window": 64},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 64},
    "smollm3": {"use_sliding_window": True, "sliding_window": 64},
    "phi3": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}
"""What makes other fields matter."""

WITHOUT_EFFECT = {
    ("deepseek_v3", "head_dim"): "that of the rotary part, which qk_rope_head_dim says",
    ("deepseek_v3", "num_key_value_heads"): "all heads share one latent",
    ("gemma3_text", "attn_logit_softcapping"): "inherited from Gemma 2, never applied",
    ("phi3", "original_max_position_embeddings"): "only longrope and yarn read it",
}


def candidates(value: object, num_layers: int) -> list[Any]:
    """Other values of the same kind; of a null, of every kind."""
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value * 2, value + 1, value / 2]
        case str():
            return ["gelu", "another"]
        case dict():
            return [{"rope_type": "dynamic", "factor": 2.0}, {**value, "rope_theta": 77.0}]
        case list():
            return [[1, 3]]
        case _:
            return [True, 64, 3, 0.5, ["sliding_attention"] * num_layers, [0] * num_layers]


def translated(raw: dict[str, Any]) -> DecoderConfig | None:
    """None: refused."""
    try:
        return config_from_hf(raw)
    except ConfigError:
        return None


@pytest.mark.parametrize("family", CLASSES)
def test_no_field_is_ignored(family: str) -> None:
    base = {"model_type": family, **CLASSES[family], **BASES.get(family, {})}
    config = config_from_hf(base)
    ignored = {
        field
        for field, value in CLASSES[family].items()
        if all(
            translated({**base, field: other}) == config
            for other in candidates(base[field], config.num_layers)
        )
    }
    assert ignored == {field for name, field in WITHOUT_EFFECT if name == family}


@pytest.mark.parametrize("family", CLASSES)
def test_a_field_that_is_not_known_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="attention_magic = 3: not known for this architecture"):
        config_from_hf({"model_type": family, **CLASSES[family], "attention_magic": 3})

"""config.json → DecoderConfig: spellings, missing and null fields, what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from jpd.errors import ConfigError
from jpd.nn.config import DecoderConfig, RopeConfig
from jpd.nn.families import FAMILIES, config_from_hf

GOLDEN = Path(__file__).parent.parent / "golden"


def raw_config(name: str, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    raw.update(changes)
    return {key: value for key, value in raw.items() if value != "absent"}


def read(name: str, **changes: Any) -> DecoderConfig:
    return config_from_hf(raw_config(name, **changes))


def problems(name: str, **changes: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read(name, **changes)
    return {problem.key: problem.rule for problem in caught.value.problems}


YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("name", "theta", "scaling"),
    [
        ("llama3", 500000.0, LLAMA3 | {"kind": "llama3"}),
        ("qwen2_yarn", 10000.0, YARN | {"kind": "yarn"}),
        ("llama2", 10000.0, {"kind": "linear", "factor": 2.0}),
    ],
)
def test_f06_the_older_spelling_of_rope_means_the_same(
    name: str, theta: float, scaling: dict[str, Any], key: str
) -> None:
    scaling = {key if k == "kind" else k: v for k, v in scaling.items()}
    old = read(name, rope_parameters="absent", rope_theta=theta, rope_scaling=scaling)
    new = read(name, rope_parameters=scaling | {"rope_theta": theta})
    assert old == new
    assert old.layers[0].rope.factor == scaling["factor"]


def test_gemma3_older_spelling_scales_only_full_layers() -> None:
    old = read(
        "gemma3",
        rope_parameters="absent",
        layer_types="absent",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
    )
    ropes = [(layer.rope.kind, layer.rope.theta, layer.sliding_window) for layer in old.layers]
    sliding, full = ("default", 1e4, 16), ("linear", 1e6, None)
    assert ropes == [sliding, sliding, full, sliding, sliding, full]


def test_gemma3_with_vision_is_read_as_its_text_decoder() -> None:
    """Published files leave out what is the default of the family."""
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "vision_config": {"hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = config_from_hf(raw)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert config.eos_token_ids == (1, 106)
    assert [i for i, layer in enumerate(config.layers) if layer.sliding_window is None] == [
        *range(5, 34, 6)
    ]
    names = FAMILIES[config.family].tensors(config)["layers.0.attn.q.weight"].names
    assert names == ("language_model.model.layers.0.self_attn.q_proj.weight",)


@pytest.mark.parametrize("head_dim", ["absent", None, 16])
def test_f05_head_dim_is_read_or_derived(head_dim: object) -> None:
    assert read("llama2", head_dim=head_dim).head_dim == 16


def test_f05_head_dim_need_not_be_the_derived_one() -> None:
    config = read("llama2", head_dim=32)
    assert (config.head_dim, config.kv_width) == (32, 64)


def test_missing_and_null_are_not_the_same() -> None:
    assert read("mistral", sliding_window="absent").layers[0].sliding_window == 4096
    assert read("mistral", sliding_window=None).layers[0].sliding_window is None
    assert read("mistral", num_key_value_heads="absent", num_attention_heads=8).num_kv_heads == 8
    assert read("mistral", num_key_value_heads=None).num_kv_heads == 4
    assert read("gemma2", final_logit_softcapping="absent").logits_softcap == 30.0
    assert read("gemma2", final_logit_softcapping=None).logits_softcap == 0.0


def test_longrope_by_its_older_name_and_by_the_ratio_of_lengths() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = read(
        "phi3",
        rope_parameters="absent",
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=64,
    )
    rope = config.layers[0].rope
    assert (rope.kind, rope.original_max_len) == ("longrope", 64)
    assert rope.attention_factor == pytest.approx((1 + 3 / 6) ** 0.5)  # 512 = 64 * 2**3, 64 = 2**6


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llama2", {"hidden_act": "relu"}, "hidden_act"),
        (
            "llama2",
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantization_config.quant_method",
        ),
        (
            "llama2",
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            "quantization_config.activation_scheme",
        ),
        (
            "llama2",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "quantization_config.weight_block_size",
        ),
        (
            "llama2",
            {"quantization_config": {"quant_method": "mxfp4", "rotation": True}},
            "quantization_config.rotation",
        ),
        ("llama2", {"sliding_window": 16}, "sliding_window"),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters.rope_type",
        ),
        ("llama2", {"rope_scaling": {"type": "no-such", "factor": 2.0}}, "rope_scaling.type"),
        (
            "llama2",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
            "rope_scaling.mrope_section",
        ),
        ("llama2", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama2", {"some_new_multiplier": 0.5}, "some_new_multiplier"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"n_group": 3}, "n_group"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, changes: dict[str, Any], key: str
) -> None:
    found = problems(name, **changes)
    assert list(found) == [key]


def test_all_faults_are_told_at_once() -> None:
    changes = {
        "hidden_size": "64",
        "vocab_size": 0,
        "rms_norm_eps": float("nan"),
        "tie_word_embeddings": "yes",
        "rope_parameters": {"rope_type": "yarn", "factor": "four"},
    }
    want = {"hidden_size", "vocab_size", "rms_norm_eps", "tie_word_embeddings"}
    assert set(problems("llama2", **changes)) == want | {"rope_parameters.factor"}


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    found = problems("llama2", architectures=["MambaForCausalLM"])
    assert "LlamaForCausalLM" in found["architectures"]
    assert "Qwen3MoeForCausalLM" in found["architectures"]


def test_a_file_without_architectures_goes_by_its_model_type() -> None:
    assert read("llama2", architectures="absent") == read("llama2")
    assert set(problems("llama2", architectures="absent", model_type="t5")) == {"model_type"}


def test_layers_without_rope() -> None:
    config = read("variants/smollm3_no_rope_layers")
    assert [layer.rope == RopeConfig(kind="none") for layer in config.layers] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_every_family_of_the_golden_folders_is_known_by_both_names() -> None:
    for folder in GOLDEN.glob("**/config.json"):
        raw = json.loads(folder.read_text())
        assert FAMILIES[raw["model_type"]] is FAMILIES[raw["architectures"][0]]

"""GGUF metadata → a table with the keys of a Hugging Face config.json.

GGUF leaves out what llama.cpp has in its code (which layers slide, Gemma's local rope base, some
scales); those rules stand here. Knows no tensor data. Called by `model_source`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jpd.checkpoint.gguf_file import GgufFile
from jpd.errors import ConfigError, Problem

ConfigTable = dict[str, Any]

GEMMA3_FULL_EVERY = 6  # layers 5, 11, ... see the whole context
GEMMA3_LOCAL_THETA = 10000.0
PARTIAL_ROTARY = frozenset({"phi3"})
GEMMA2_LAYERS_27B = 46
GEMMA3_LAYERS_27B = 62

# What transformers' own llama3 scaling computes: all published Llama 3.x checkpoints share these.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL_LEN = 1.0, 4.0, 8192


NO_EFFECT = frozenset(
    {
        "vocab_size",  # the embedding's shape says it
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",  # computed from the other figures of longrope
        "tensor_data_layout",
    }
)
"""Keys below the architecture's name that change nothing in the models known here."""


def _is_set(value: Any) -> bool:
    return bool(value) if isinstance(value, str | list) else bool(np.any(value))


class _Metadata:
    """Metadata of one architecture; a missing key is an error, and so is one never asked for."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.read: set[str] = set(NO_EFFECT)
        self.arch = str(self.require("general.architecture"))

    def fail(self, key: str, value: object, rule: str) -> ConfigError:
        return ConfigError([Problem(str(self.file.path), f"{self.arch}.{key}", value, rule)])

    def refuse_unread(self) -> None:
        """Raise ConfigError for every key of the architecture that nobody asked for."""
        prefix = f"{self.arch}."
        problems = []
        for key, value in self.file.metadata.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in self.read and _is_set(value):
                rule = "not known for this architecture: it might change the computation"
                problems.append(Problem(str(self.file.path), key, value, rule))
        if problems:
            raise ConfigError(problems)

    def require(self, key: str) -> Any:
        if key not in self.file.metadata:
            rule = "this metadata key is needed"
            raise ConfigError([Problem(str(self.file.path), key, None, rule)])
        return self.file.metadata[key]

    def own(self, key: str) -> Any:
        self.read.add(key)
        return self.require(f"{self.arch}.{key}")

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def factors(self, name: str) -> list[float] | None:
        """The numbers of a small float32 tensor, such as rope factors."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        count = int(np.prod(tensor.shape))
        values = np.frombuffer(self.file.buffer, "<f4", count, tensor.offset)
        return [float(value) for value in values]

    def same_for_all_layers(self, key: str) -> int:
        value = self.own(key)
        values = {int(item) for item in np.atleast_1d(value)}
        if len(values) != 1:
            raise self.fail(key, value, "layers that differ in it are not supported")
        return values.pop()


def config_from_gguf(file: GgufFile) -> ConfigTable:
    """The config.json of the model in `file`. Raises ConfigError for an unknown architecture."""
    metadata = _Metadata(file)
    build = BUILDERS.get(metadata.arch)
    if build is None:
        rule = f"GGUF architecture not supported; known: {', '.join(sorted(BUILDERS))}"
        problem = Problem(str(file.path), "general.architecture", metadata.arch, rule)
        raise ConfigError([problem])
    config = _common(metadata)
    config.update(build(metadata, config))
    metadata.refuse_unread()
    return config


def _common(metadata: _Metadata) -> ConfigTable:
    embed_dim = int(metadata.own("embedding_length"))
    num_heads = metadata.same_for_all_layers("attention.head_count")
    head_dim = int(metadata.get("attention.key_length", embed_dim // num_heads))
    _check_sizes(metadata, head_dim)
    token_info = metadata.file.tensors.get("token_embd.weight")
    if token_info is None:
        rule = "this tensor is needed"
        problem = Problem(str(metadata.file.path), "token_embd.weight", "missing", rule)
        raise ConfigError([problem])
    ids = metadata.file.metadata
    eos_ids = [ids[key] for key in (EOS_KEY, EOT_KEY) if key in ids]
    return {
        "vocab_size": token_info.shape[0],
        "hidden_size": embed_dim,
        "intermediate_size": metadata.same_for_all_layers("feed_forward_length"),
        "num_hidden_layers": int(metadata.own("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(metadata, num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(metadata.own("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(metadata.own("context_length")),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "bos_token_id": ids.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(eos_ids)),
    }


def _check_sizes(metadata: _Metadata, head_dim: int) -> None:
    """Heads of one size that rotate as a whole, unless the architecture says otherwise."""
    value_dim = int(metadata.get("attention.value_length", head_dim))
    if value_dim != head_dim:
        rule = f"must equal attention.key_length, {head_dim}"
        raise metadata.fail("attention.value_length", value_dim, rule)
    rotary_dim = int(metadata.get("rope.dimension_count", head_dim))
    if rotary_dim != head_dim and metadata.arch not in PARTIAL_ROTARY:
        rule = f"must equal the size of a head, {head_dim}"
        raise metadata.fail("rope.dimension_count", rotary_dim, rule)


EOS_KEY, EOT_KEY = "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"


def _num_kv_heads(metadata: _Metadata, num_heads: int) -> int:
    if metadata.get("attention.head_count_kv") is None:
        return num_heads
    return metadata.same_for_all_layers("attention.head_count_kv")


def _rope(metadata: _Metadata, default_theta: float = 10000.0) -> ConfigTable:
    """rope_parameters as transformers spells them, from metadata or from stored factors."""
    theta = float(metadata.get("rope.freq_base", default_theta))
    kind = metadata.get("rope.scaling.type", "none")
    factor = float(metadata.get("rope.scaling.factor", 1.0))
    original_len = metadata.get("rope.scaling.original_context_length")
    stored = metadata.factors("rope_freqs.weight")
    if stored is not None and any(value != 1.0 for value in stored):
        return _llama3_rope(metadata, theta, stored)
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        betas = {"fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0)}
        betas["slow"] = metadata.get("rope.scaling.yarn_beta_slow", 1.0)
        rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        rope |= {f"beta_{name}": float(beta) for name, beta in betas.items()}
        return rope | {"original_max_position_embeddings": original_len}
    if kind in ("none", "longrope"):  # longrope: its factors are read by the architecture
        return {"rope_type": "default", "rope_theta": theta}
    raise metadata.fail("rope.scaling.type", kind, "must be none, linear, yarn or longrope")


def _llama3_rope(metadata: _Metadata, theta: float, stored: list[float]) -> ConfigTable:
    """Llama 3 scaling is stored as divisors of the frequencies: find its parameters."""
    rotary_dim = 2 * len(stored)
    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    turns = LLAMA3_ORIGINAL_LEN * frequencies / (2 * np.pi)
    factor = max(stored)
    smooth = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(expected, stored, rtol=1e-3):
        rule = "are not those of Llama 3 scaling with an original length of 8192"
        path = str(metadata.file.path)
        raise ConfigError([Problem(path, "rope_freqs.weight", stored[:4], rule)])
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_LEN,
    }


def _llama(metadata: _Metadata, config: ConfigTable) -> ConfigTable:
    table: ConfigTable = {
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
    }
    if int(metadata.get("expert_count", 0)) > 0:
        del table["attention_bias"], table["mlp_bias"]
        table["model_type"] = "mixtral"
        table["num_local_experts"] = int(metadata.own("expert_count"))
        table["num_experts_per_tok"] = int(metadata.own("expert_used_count"))
        expert_dim = metadata.get("expert_feed_forward_length", config["intermediate_size"])
        table["intermediate_size"] = int(expert_dim)
        table["sliding_window"] = None
    return table


def _granite(metadata: _Metadata, config: ConfigTable) -> ConfigTable:
    return {
        "model_type": "granite",
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
        "embedding_multiplier": float(metadata.own("embedding_scale")),
        "residual_multiplier": float(metadata.own("residual_scale")),
        "attention_multiplier": float(metadata.own("attention.scale")),
        "logits_scaling": float(metadata.own("logit_scale")),
    }


def _qwen(metadata: _Metadata, config: ConfigTable) -> ConfigTable:
    table: ConfigTable = {
        "model_type": metadata.arch,
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata),
        "use_sliding_window": False,
    }
    if metadata.arch == "qwen3moe":
        table["model_type"] = "qwen3_moe"
        table["num_experts"] = int(metadata.own("expert_count"))
        table["num_experts_per_tok"] = int(metadata.own("expert_used_count"))
        table["moe_intermediate_size"] = int(metadata.own("expert_feed_forward_length"))
        table["norm_topk_prob"] = bool(metadata.get("expert_weights_norm", True))
        table["decoder_sparse_step"] = 1
        table["mlp_only_layers"] = []
    if metadata.arch.startswith("qwen3"):
        table["attention_bias"] = metadata.has_tensor("blk.0.attn_q.bias")
    return table


def _gemma2(metadata: _Metadata, config: ConfigTable) -> ConfigTable:
    num_layers = config["num_hidden_layers"]
    scalar = config["head_dim"]
    if num_layers == GEMMA2_LAYERS_27B:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    kinds = ("sliding_attention", "full_attention")
    return {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": float(metadata.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(metadata.get("final_logit_softcapping", 30.0)),
        "sliding_window": int(metadata.own("attention.sliding_window")),
        "layer_types": [kinds[layer % 2] for layer in range(num_layers)],
        "rope_parameters": _rope(metadata),
    }


def _gemma3(metadata: _Metadata, config: ConfigTable) -> ConfigTable:
    num_layers = config["num_hidden_layers"]
    scalar = config["head_dim"]
    if num_layers == GEMMA3_LAYERS_27B:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    pattern = metadata.get("attention.sliding_window_pattern", GEMMA3_FULL_EVERY)
    if isinstance(pattern, int):
        full = [(layer + 1) % pattern == 0 for layer in range(num_layers)]
    else:  # one flag per layer
        full = [not slides for slides in pattern]
    local_theta = float(metadata.get("rope.freq_base_swa", GEMMA3_LOCAL_THETA))
    local_rope = {"rope_type": "default", "rope_theta": local_theta}
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "sliding_window": int(metadata.own("attention.sliding_window")),
        "layer_types": ["full_attention" if whole else "sliding_attention" for whole in full],
        "rope_parameters": {
            "full_attention": _rope(metadata, 1_000_000.0),
            "sliding_attention": local_rope,
        },
    }


def _phi3(metadata: _Metadata, config: ConfigTable) -> ConfigTable:
    long_factor = metadata.factors("rope_factors_long.weight")
    short_factor = metadata.factors("rope_factors_short.weight")
    rope = _rope(metadata)
    original_len = metadata.get("rope.scaling.original_context_length")
    if long_factor is not None and short_factor is not None:
        rope = {"rope_type": "longrope", "rope_theta": rope["rope_theta"]}
        rope |= {"long_factor": long_factor, "short_factor": short_factor}
    rotary_dim = int(metadata.get("rope.dimension_count", config["head_dim"]))
    window = metadata.get("attention.sliding_window")
    return {
        "model_type": "phi3",
        "hidden_act": "silu",
        "rope_parameters": rope,
        "partial_rotary_factor": rotary_dim / config["head_dim"],
        "original_max_position_embeddings": original_len or config["max_position_embeddings"],
        "sliding_window": int(window) if window else None,
    }


def _olmo2(metadata: _Metadata, config: ConfigTable) -> ConfigTable:
    return {
        "model_type": "olmo2",
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata),
        "attention_bias": False,
    }


BUILDERS: Mapping[str, Callable[[_Metadata, ConfigTable], ConfigTable]] = {
    "llama": _llama,
    "granite": _granite,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3moe": _qwen,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
}

"""Small .gguf files, made from golden checkpoints by the rules of llama.cpp's converter.

Names come from the `gguf` package's own table and the order of rotary rows is permuted here, so
that the reader is tested against something it does not share code with.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from jpd.checkpoint.sentencepiece_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
)

ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
}
PERMUTED = ("llama", "mixtral", "granite")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")
START_OF_TURN, END_OF_TURN = "<start_of_turn>", "<end_of_turn>"
WORDS = ("a", "b", "l", "o", "h", "e", "he", "ll", "hell", f"{SPACE}h", "hello", f"{SPACE}hello")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}"
)


def write_gguf(
    checkpoint: Path,
    target: Path,
    kind: str = "F32",
    *,
    with_tokenizer: bool = False,
    without: Sequence[str] = (),
) -> Path:
    """The golden `checkpoint` as a .gguf file; matrices stored as `kind` where rows allow it."""
    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, config)
    if with_tokenizer:
        write_tokenizer(writer, config["vocab_size"])
    name_map = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, values in _stack_experts(checkpoint).items():
        stored = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored not in without:
            values = _as_converted(name, values, config)
            _add_tensor(writer, stored, values, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _stack_experts(checkpoint: Path) -> dict[str, np.ndarray]:
    """The tensors as float32, those of a layer's experts as one [experts, ...]."""
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    with safe_open(checkpoint / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118
            values = file.get_tensor(name).astype(np.float32)
            match = EXPERT.fullmatch(name)
            if match is None:
                tensors[name] = values
            else:
                stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
    return tensors | {n: np.stack([parts[i] for i in sorted(parts)]) for n, parts in stacks.items()}


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    block_numbers, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim < 2 or values.shape[-1] % block_numbers:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _as_converted(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if config["model_type"] in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
        key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        heads = config[key]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size", config["intermediate_size"])
        )
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Gemma's kind of vocabulary: control tokens, user-defined runs of spaces, words, and bytes."""
    rows = [("<pad>", CONTROL), ("<bos>", CONTROL), ("<eos>", CONTROL), ("<unk>", UNKNOWN)]
    rows += [(START_OF_TURN, CONTROL), (END_OF_TURN, CONTROL), ("  ", USER_DEFINED)]
    rows += [(SPACE, NORMAL), ("user", USER_DEFINED), *((word, NORMAL) for word in WORDS)]
    if vocab_size >= len(rows) + 256:
        rows += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    rows += [(f"<unused{index}>", CONTROL) for index in range(vocab_size - len(rows))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_scores([-float(index) for index in range(len(rows))])
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)

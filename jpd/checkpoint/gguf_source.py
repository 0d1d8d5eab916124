"""The tensors of a .gguf file under their Hugging Face names and in Hugging Face's layout.

Undoes what llama.cpp's converter did: stacked experts are split again, llama's query and key rows
put back into half-split rotary order, Gemma's norm weights stored as offset from 1 again. Quantised
rows are dequantised by the `gguf` package, only those that are asked for. Called by `model_source`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpd.checkpoint.gguf_file import GgufFile, GgufTensor, block_sizes
from jpd.checkpoint.source import HostArray, Slices, TensorInfo, full_slices
from jpd.errors import ConfigError, Problem

FLOAT32 = np.dtype(np.float32)

PIECE_NUMBERS = 1 << 19
"""Numbers dequantised at a time: the package makes several temporary arrays of this size."""

TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}

GEMMA_NAMES: Mapping[str, str] = {"ffn_norm": "pre_feedforward_layernorm"}
ARCH_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma2": GEMMA_NAMES,
    "gemma3": GEMMA_NAMES,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
MIXTRAL_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}

NORM_PLUS_ONE = frozenset({"gemma2", "gemma3"})
INTERLEAVED_ROPE = frozenset({"llama", "granite"})
CONFIG_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)  # read by gguf_config


@dataclass(frozen=True, slots=True)
class _Entry:
    tensor: GgufTensor
    expert: int | None = None  # index along the stored tensor's first dim
    num_rotary_heads: int = 0  # rows of so many heads are in interleaved order
    offset: float = 0.0  # added to every number

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


class GgufSource:
    """Tensors of one .gguf file; every array read is float32."""

    def __init__(self, file: GgufFile, entries: Mapping[str, _Entry]) -> None:
        self._file = file
        self._entries = dict(entries)
        self._block_sizes = block_sizes()

    @property
    def location(self) -> str:
        return str(self._file.path)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._entries[name].shape, FLOAT32)

    def file_of(self, name: str) -> str:
        return f"{self._file.path} ({self._entries[name].tensor.name})"

    def read(self, name: str) -> HostArray:
        return self.read_slice(name, full_slices(self._entries[name].shape))

    def read_slice(self, name: str, slices: Slices) -> HostArray:
        entry = self._entries[name]
        bounds = [part.indices(dim)[:2] for part, dim in zip(slices, entry.shape, strict=True)]
        first, end = bounds[0] if bounds else (0, 1)
        if entry.num_rotary_heads:
            values = self._rotary_rows(entry, first, end)
        else:
            values = self._rows(entry, first, end)
        rest = tuple(slice(low, high) for low, high in bounds[1:])
        values = values[(slice(None), *rest)] if bounds else values.reshape(())
        if entry.offset:
            values = values + np.float32(entry.offset)
        return np.ascontiguousarray(values, dtype=np.float32)

    def _rows(self, entry: _Entry, first: int, end: int) -> HostArray:
        """Rows [first, end) of the stored tensor, dequantised; whole in every other dim."""
        shape = entry.shape or (1,)
        row_numbers = int(np.prod(shape[1:]))
        if (
            row_numbers % self._block_sizes[entry.tensor.type_id][0]
        ):  # a vector of quantised numbers: one row of blocks
            return self._numbers(entry, 0, int(np.prod(shape))).reshape(shape)[first:end]
        start = (entry.expert or 0) * shape[0] + first
        values = self._numbers(entry, start * row_numbers, (start + end - first) * row_numbers)
        return values.reshape(-1, *shape[1:])

    def _numbers(self, entry: _Entry, first: int, end: int) -> HostArray:
        """Numbers [first, end) of the stored tensor in file order; both at the edge of a block."""
        block_numbers, block_bytes = self._block_sizes[entry.tensor.type_id]
        values = np.empty(end - first, np.float32)
        step = max(1, PIECE_NUMBERS // block_numbers) * block_numbers
        for low in range(first, end, step):
            high = min(low + step, end)
            num_bytes = (high - low) // block_numbers * block_bytes
            start = entry.tensor.offset + low // block_numbers * block_bytes
            raw = np.frombuffer(self._file.buffer, np.uint8, num_bytes, start)
            values[low - first : high - first] = self._dequantize(raw, entry)
        return values

    def _dequantize(self, raw: HostArray, entry: _Entry) -> HostArray:
        try:
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize

            values: HostArray = dequantize(raw, GGMLQuantizationType(entry.tensor.type_id))
        except (NotImplementedError, ValueError) as error:
            kind = entry.tensor.type_id
            problem = Problem(self.location, entry.tensor.name, kind, f"quantisation: {error}")
            raise ConfigError([problem]) from error
        return values

    def _rotary_rows(self, entry: _Entry, first: int, end: int) -> HostArray:
        """Rows in half-split order: row (half, i) of a head is stored at 2 i + half."""
        head_rows = entry.shape[0] // entry.num_rotary_heads
        low = first // head_rows * head_rows
        high = -(-end // head_rows) * head_rows
        stored = self._rows(entry, low, high)
        split = stored.reshape(-1, head_rows // 2, 2, *stored.shape[1:])
        return split.swapaxes(1, 2).reshape(stored.shape)[first - low : end - low]


def gguf_source(file: GgufFile) -> GgufSource:
    """The tensors of `file`. Raises ConfigError with every tensor that is not known."""
    arch = str(file.metadata.get("general.architecture"))
    translate = _translator(file, arch)
    entries: dict[str, _Entry] = {}
    problems = []
    for name, tensor in file.tensors.items():
        if name in CONFIG_TENSORS:
            continue
        found = translate(tensor)
        if not found or found.keys() & entries.keys():
            rule = f"a tensor not known for architecture {arch}"
            problems.append(Problem(str(file.path), name, list(tensor.shape), rule))
        entries.update(found)
    if problems:
        raise ConfigError(problems)
    return GgufSource(file, entries)


_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def _translator(file: GgufFile, arch: str) -> Callable[[GgufTensor], dict[str, _Entry]]:
    """A function from a stored tensor to its Hugging Face tensors; {} for one that is not known."""
    metadata = file.metadata
    names = {**LAYER_NAMES, **ARCH_NAMES.get(arch, {})}
    if arch == "llama" and _count(metadata, "llama.expert_count"):
        names.update(MIXTRAL_NAMES)
    rotary_heads: dict[str, int] = {}
    if arch in INTERLEAVED_ROPE:
        num_heads = _count(metadata, f"{arch}.attention.head_count")
        num_kv_heads = _count(metadata, f"{arch}.attention.head_count_kv") or num_heads
        rotary_heads = {"attn_q": num_heads, "attn_k": num_kv_heads}

    def translate(tensor: GgufTensor) -> dict[str, _Entry]:
        norm = arch in NORM_PLUS_ONE and tensor.name.endswith("norm.weight")
        offset = -1.0 if norm else 0.0
        if tensor.name in TOP_NAMES:
            return {TOP_NAMES[tensor.name]: _Entry(tensor, offset=offset)}
        match = _LAYER.fullmatch(tensor.name)
        if match is None or match[2] not in names:
            return {}
        name = f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
        if "{expert}" in name:
            experts = range(tensor.shape[0])
            return {name.format(expert=index): _Entry(tensor, index) for index in experts}
        heads = rotary_heads.get(match[2], 0)
        return {name: _Entry(tensor, num_rotary_heads=heads, offset=offset)}

    return translate


def _count(metadata: Mapping[str, Any], key: str) -> int:
    return int(np.max(metadata.get(key, 0)))

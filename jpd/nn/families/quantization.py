"""quantization_config of config.json: in which form a folder's matrices are stored.

They are dequantised while they are loaded, so nothing of it is in DecoderConfig. A form that is not
known is refused by name. Called by `Family.to_config`, and by `jpd.checkpoint` to read the tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jpd.nn.families.fields import Fields

QUANTIZATION = "quantization_config"
FP8, MXFP4 = "fp8", "mxfp4"


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """`block`: how many rows and columns of a float8 matrix share a scale."""

    method: str  # FP8 or MXFP4
    block: tuple[int, int] = (128, 128)


def read_quantization(fields: Fields) -> StoredQuantization | None:
    """None: nothing is quantised. What is wrong is noted in `fields`."""
    raw = fields.get(QUANTIZATION)
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        fields.problem(QUANTIZATION, raw, "must be a table")
        return None
    inner = Fields(raw, fields.file, f"{QUANTIZATION}.")
    methods = {FP8: FP8, MXFP4: MXFP4}
    method = inner.choice("quant_method", allowed=methods, default=FP8)
    inner.read.update(  # which matrices are quantised, their scales tell
        ("modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize")
    )
    found = StoredQuantization(method)
    if method == FP8 and not inner.problems:
        inner.fixed("activation_scheme", "dynamic")
        inner.fixed("fmt", "e4m3")
        inner.fixed("expert_dtype", "fp8")
        inner.fixed("scale_fmt", "float", "ue8m0")
        found = StoredQuantization(method, _read_block(inner))
    if not inner.problems:  # a method that is not known has fields of its own
        inner.refuse_unread()
    fields.problems.extend(inner.problems)
    return found


def _read_block(fields: Fields) -> tuple[int, int]:
    value: Any = fields.get("weight_block_size")
    if value is None:
        value = [128, 128]
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        fields.problem("weight_block_size", value, "must be two positive integers")
        return 128, 128
    return value[0], value[1]


def quantization_of(raw: Mapping[str, Any], file: str) -> StoredQuantization | None:
    """Of a config.json that `Family.to_config` has accepted."""
    return read_quantization(Fields(raw, file))

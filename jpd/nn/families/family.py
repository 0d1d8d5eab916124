"""What a family is: two functions, and the names by which config.json asks for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jpd.nn.config import DecoderConfig
from jpd.nn.families.fields import Fields
from jpd.nn.families.quantization import read_quantization
from jpd.nn.tensor_ref import TensorRef


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one kind are configured and stored."""

    name: str  # model_type of config.json
    architectures: tuple[str, ...]
    read_config: Callable[[Fields], DecoderConfig]
    tensors: Callable[[DecoderConfig], dict[str, TensorRef]]
    """Parameter path → where it is in the checkpoint, for every parameter of the decoder."""
    has_layers_beyond: bool = False
    """Checkpoints hold layers after the last one, which draft further tokens; nothing uses them."""

    def to_config(self, raw: Mapping[str, Any], file: str = "config.json") -> DecoderConfig:
        """Translate config.json. Raises ConfigError with every field that is wrong or unknown."""
        fields = Fields(raw, file)
        read_quantization(fields)
        config = self.read_config(fields)
        if config.num_heads % config.num_kv_heads:
            rule = f"must divide num_attention_heads = {config.num_heads}"
            fields.problem("num_key_value_heads", config.num_kv_heads, rule)
        fields.finish()
        return config

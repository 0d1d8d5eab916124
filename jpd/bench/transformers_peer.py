"""Hugging Face transformers on torch CPU with the same weights: a Peer.

Its model is built from the card's configuration and filled from the same tensors. A prompt is one
forward pass; a decode step is one with a cache that holds the context. Needs the extra `peers`; the
CPU build of torch comes from its own index, see docs/benchmarks.md.
"""

import importlib
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from jpd.checkpoint.model_source import Model
from jpd.checkpoint.orbax_source import OrbaxSource
from jpd.checkpoint.source import TensorSource
from jpd.errors import ConfigError, Problem

DTYPES = ("float32", "bfloat16")
PACKAGES = ("torch", "transformers")


def is_installed() -> bool:
    return all(find_spec(package) is not None for package in PACKAGES)


class TransformersPeer:
    """A model of transformers in one dtype."""

    def __init__(self, model: Model, dtype: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        source = model.require_source()
        if isinstance(source, OrbaxSource):
            rule = "transformers is given tensors by their Hugging Face names; Orbax has none"
            raise ConfigError([Problem("jpd bench peers", "model", model.name, rule)])
        self._config = self._transformers.AutoConfig.for_model(**model.raw_config)
        classes: Any = self._transformers.AutoModelForCausalLM
        self._model = classes.from_config(self._config).eval()
        _fill(self._model, source, self._torch)
        self._model = self._model.to(getattr(self._torch, dtype))

    def prefill_seconds(self, num_tokens: int, num_prompts: int) -> float:
        """Prompts, all at once, to their first tokens."""
        prompts = self._prompt(num_tokens).repeat(num_prompts, 1)
        start = time.perf_counter()
        self._run(prompts, self._new_cache())
        return time.perf_counter() - start

    def decode_seconds(self, batch: int, context: int, num_steps: int) -> float:
        """Per step, of rows that all hold `context` tokens before the first."""
        cache = self._new_cache()
        tokens = self._run(self._prompt(context), cache).logits[:, -1:].argmax(-1)
        if batch > 1:
            cache.batch_repeat_interleave(batch)
            tokens = tokens.repeat(batch, 1)
        start = time.perf_counter()
        for _ in range(num_steps):
            tokens = self._run(tokens, cache).logits[:, -1:].argmax(-1)
        return (time.perf_counter() - start) / num_steps

    def logits(self, token_ids: Sequence[int]) -> Any:
        """Of every position, as a numpy array [T, V]."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([list(token_ids)])
            return self._model(ids).logits[0].float().numpy()

    def _run(self, token_ids: Any, cache: Any) -> Any:
        with self._torch.inference_mode():
            return self._model(token_ids, cache=cache, use_cache=True, logits_to_keep=1)

    def _new_cache(self) -> Any:
        return self._transformers.DynamicCache(config=self._config)

    def _prompt(self, num_tokens: int) -> Any:
        return self._torch.arange(num_tokens)[None] % 1000 + 3


def _fill(module: Any, source: TensorSource, torch: Any) -> None:
    """Every parameter from the tensor of its name; a tied head has none."""
    named: Mapping[str, Any] = dict(module.named_parameters())
    missing = sorted(named.keys() - source.names)
    if missing:
        rule = f"transformers has parameters that the checkpoint has not: {', '.join(missing[:3])}"
        raise ConfigError([Problem(source.location, "tensors", len(missing), rule)])
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(source.read(name)))

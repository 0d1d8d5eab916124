"""What int8 on the wire does to a model's logits, and what it saves in bytes.

A prompt of several chunks is computed twice: as it is stored, and with the KV of every chunk sent
once over the wire before the next one reads it. Called by `jpd bench transfer`.
"""

import numpy as np
import numpy.typing as npt

from jpd.bench.engine_rig import DTYPE, LoadedModel
from jpd.bench.results import Result
from jpd.cache.kv_cache import KVSpec
from jpd.config import CacheConfig, EngineConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.functions import ModelFunctions
from jpd.transfer.plan import kv_bytes_per_token, wire_bytes_per_token
from jpd.transfer.wire import Wire

CHUNK, NUM_CHUNKS, PAGE_SIZE = 64, 4, 16
NUM_TOKENS = CHUNK * NUM_CHUNKS


def wire_error_results(model: LoadedModel, *, wire_dtype: str = "int8") -> list[Result]:
    """Over all positions after the first chunk of one prompt."""
    exact, sent = (logits_of(model, dtype) for dtype in (None, wire_dtype))
    error = np.abs(exact - sent)[CHUNK:]
    num_equal = int(np.sum((exact.argmax(-1) == sent.argmax(-1))[CHUNK:]))
    config = model.config
    saved = 1 - wire_bytes_per_token(config, wire_dtype) / kv_bytes_per_token(config, 2)
    name = f"{wire_dtype} on the wire, {config.family}"
    return [
        Result(f"{name}: max |logit difference|", float(error.max()), ""),
        Result(f"{name}: mean |logit difference|", float(error.mean()), ""),
        Result(f"{name}: greedy tokens that stay", num_equal / (NUM_TOKENS - CHUNK), ""),
        Result(f"{name}: bytes saved of bfloat16", saved, ""),
    ]


def logits_of(model: LoadedModel, wire_dtype: str | None) -> npt.NDArray[np.float32]:
    """float32 [NUM_TOKENS, V]; with a dtype, as KV of that dtype on the wire makes them."""
    config = model.config
    engine = EngineConfig(NUM_TOKENS, CHUNK, (CHUNK,), (NUM_TOKENS,), "float32")
    buckets = ShapeBuckets.from_config(engine, CacheConfig(page_size=PAGE_SIZE), NUM_TOKENS)
    spec = KVSpec(
        num_layers=config.num_layers,
        num_pages=1,
        page_size=PAGE_SIZE,
        num_cached_heads=config.num_cached_heads,
        kv_width=config.kv_width,
        dtype=DTYPE,
        kv_parts=config.kv_parts,
    )
    functions = ModelFunctions(config, DTYPE, model.mesh, spec, buckets, 1)
    wire = wire_dtype and Wire(1, PAGE_SIZE, buckets.page_moves, 0, wire_dtype)
    draw = np.random.default_rng(0)
    token_ids = draw.integers(3, min(config.vocab_size, 1000), NUM_TOKENS).tolist()
    return functions.logits(model.leaves, token_ids, wire or None)

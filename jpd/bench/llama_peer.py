"""llama.cpp with the same .gguf file, through the C interface of `llama-cpp-python`: a Peer.

Its arithmetic is that of the file: weights stay quantised, most of them in 4 bits, and are
multiplied as such, where jpd and transformers make them float32 first. All sequences have a cache
of their own. Needs the extra `peers`.
"""

import ctypes
import importlib
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jpd.errors import ConfigError, Problem

MARGIN_TOKENS = 128
PROMPT_BATCH = 512
SEQUENCES = "seq_id"
"""What llama.cpp calls the sequences of a batch's tokens."""


def is_installed() -> bool:
    return find_spec("llama_cpp") is not None


class LlamaCppPeer:
    """One model; a context for as many sequences as the largest batch has."""

    def __init__(self, path: Path, num_sequences: int, num_tokens: int) -> None:
        """Each sequence has room for `num_tokens`. Raises ConfigError for a file it cannot read."""
        self._lib: Any = importlib.import_module("llama_cpp")
        self._quiet = self._lib.llama_log_callback(lambda level, text, data: None)
        self._lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(
            str(path).encode(), self._lib.llama_model_default_params()
        )
        if not self._model:
            rule = "llama.cpp cannot load it"
            raise ConfigError([Problem("jpd bench peers", "model", str(path), rule)])
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = self._lib.llama_vocab_n_tokens(vocabulary)
        self._context = self._new_context(num_sequences, num_tokens + MARGIN_TOKENS)
        self._batch = self._lib.llama_batch_init(PROMPT_BATCH, 0, 1)
        self._rows: list[int] = []  # the next token of each sequence
        self._length = 0  # tokens that each of them holds

    def _new_context(self, num_sequences: int, num_tokens: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = num_sequences * num_tokens
        params.n_batch = params.n_ubatch = PROMPT_BATCH
        params.n_seq_max = num_sequences
        params.kv_unified = False
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            rule = "llama.cpp has no room for that many"
            raise ConfigError([Problem("jpd bench peers", "sequences", num_sequences, rule)])
        return context

    def prefill_seconds(self, num_tokens: int, num_prompts: int) -> float:
        """Prompts, packed into batches, to their first tokens."""
        self._clear()
        start = time.perf_counter()
        self._prefill(num_tokens, num_prompts)
        return time.perf_counter() - start

    def decode_seconds(self, batch: int, context: int, num_steps: int) -> float:
        """Per step, of rows that all hold `context` tokens before the first.

        Called again for the same rows it goes on with them: they hold a few tokens more. All rows
        hold the same prompt, computed once.
        """
        places = range(batch)
        if len(self._rows) != batch or not context <= self._length <= context + MARGIN_TOKENS // 2:
            self._clear()
            self._rows, self._length = self._prefill(context, 1) * batch, context
            memory = self._lib.llama_get_memory(self._context)
            for sequence in places[1:]:
                self._lib.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        start = time.perf_counter()
        for _ in range(num_steps):
            self._run([(self._rows[place], self._length, place, True) for place in places])
            self._rows = [self._choose(place) for place in places]
            self._length += 1
        return (time.perf_counter() - start) / num_steps

    def _prefill(self, num_tokens: int, num_prompts: int) -> list[int]:
        """The first token of each."""
        rows = [
            (3 + place % 1000, place, sequence, place == num_tokens - 1)
            for sequence in range(num_prompts)
            for place in range(num_tokens)
        ]
        tokens = []
        for start in range(0, len(rows), PROMPT_BATCH):
            batch = rows[start : start + PROMPT_BATCH]
            self._run(batch)
            tokens += [self._choose(place) for place, row in enumerate(batch) if row[-1]]
        return tokens

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows of token, position, sequence, and whether its logits are wanted."""
        batch, sequences = self._batch, getattr(self._batch, SEQUENCES)
        batch.n_tokens = len(rows)
        for place, (token, position, sequence, has_logits) in enumerate(rows):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], sequences[place][0] = 1, sequence
            batch.logits[place] = has_logits
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")

    def _choose(self, place: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._rows = []

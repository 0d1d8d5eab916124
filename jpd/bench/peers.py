"""`jpd bench peers`: the engines beside other programs, same weights and lengths, one run.

1. Prompts of 512 tokens alone: tokens per second to the first token.
2. Decode steps at batch 1, 8 and 32, rows of 512 tokens: tokens per second of all rows.
All take turns, so that a busy machine slows all. Hugging Face transformers computes in float32 as
jpd does on a CPU; llama.cpp computes in the 4 bits of the file. Needs the extra `peers`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jpd.bench import llama_peer, transformers_peer
from jpd.bench.engine_rig import EngineRig, load_model
from jpd.bench.floor import check_plain
from jpd.bench.results import Result, Say
from jpd.checkpoint.model_source import Model
from jpd.errors import ConfigError, Problem

BATCHES = (1, 8, 32)
CONTEXT = 512
MAX_MODEL_LEN = 1024
MARGIN_TOKENS = 128
PROBE_TOKENS = (2, *range(100, 115))


class Peer(Protocol):
    """Another program that prefills and decodes, or our own engines."""

    @property
    def name(self) -> str: ...

    def prefill_seconds(self, num_tokens: int, num_prompts: int) -> float:
        """Prompts to their first tokens."""
        ...

    def decode_seconds(self, batch: int, context: int, num_steps: int) -> float:
        """Per step, of rows that all hold `context` tokens before the first."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How often things are measured."""

    rounds: int  # medians are over these; one more before them is not counted
    steps: int  # decode steps in a round
    dtypes: tuple[str, ...]  # of transformers


FULL = Effort(rounds=5, steps=8, dtypes=("float32", "bfloat16"))
QUICK = Effort(rounds=2, steps=3, dtypes=("float32",))


class OwnEngines:
    """A Peer like the others."""

    name = "jpd float32"

    def __init__(self, model: Model, batches: Sequence[int]) -> None:
        loaded = load_model(model.config, model.require_source())
        self._rig = EngineRig(
            loaded,
            batches=batches,
            pool_tokens=max(batches) * (CONTEXT + MARGIN_TOKENS),
            max_model_len=MAX_MODEL_LEN,
        )

    def prefill_seconds(self, num_tokens: int, num_prompts: int) -> float:
        return self._rig.prefill_seconds(num_tokens, num_prompts)

    def decode_seconds(self, batch: int, context: int, num_steps: int) -> float:
        return self._rig.decode_seconds(batch, context, num_steps)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        functions = self._rig.functions[min(self._rig.functions)]
        return functions.logits(self._rig.model.leaves, list(token_ids))


def is_any_installed() -> bool:
    return transformers_peer.is_installed() or llama_peer.is_installed()


def run(model: Model, say: Say, *, is_quick: bool = False) -> list[Result]:
    """`say` hears what is done. Raises ConfigError without a peer, or for a model with experts."""
    check_plain(model.config, model.name)
    if not is_any_installed():
        rule = "none is installed: pip install 'jpd[peers]'"
        raise ConfigError([Problem("jpd bench", "peers", "none", rule)])
    effort, results = QUICK if is_quick else FULL, list[Result]()
    say("loading jpd's engines ...")
    ours = OwnEngines(model, BATCHES)
    found: list[Peer] = [ours]
    if transformers_peer.is_installed():
        for dtype in effort.dtypes:
            say(f"loading transformers, {dtype} ...")
            peer = transformers_peer.TransformersPeer(model, dtype)
            ours_logits, theirs = ours.logits(PROBE_TOKENS), peer.logits(PROBE_TOKENS)
            difference = float(np.abs(ours_logits - theirs).max())
            name = f"{peer.name}: largest difference of logits from jpd's"
            results.append(Result(name, difference, ""))
            found.append(peer)
    location = Path(model.require_source().location)
    if llama_peer.is_installed() and location.suffix == ".gguf":
        say("loading llama.cpp ...")
        found.append(llama_peer.LlamaCppPeer(location, max(BATCHES), CONTEXT))
    return results + side_by_side(found, BATCHES, effort, say)


def side_by_side(
    peers: Sequence[Peer], batches: Sequence[int], effort: Effort, say: Say
) -> list[Result]:
    """Tokens per second of each, measured by turns."""
    say(f"prefill of {', '.join(peer.name for peer in peers)} ...")
    results = []
    whole = [partial(peer.prefill_seconds, CONTEXT, 1) for peer in peers]
    for peer, seconds in zip(peers, by_turns(whole, effort.rounds), strict=True):
        name = f"prefill of {CONTEXT} tokens: {peer.name}"
        results.append(Result(name, CONTEXT / seconds, "tokens/s"))
    for batch in batches:
        say(f"decode at batch {batch} ...")
        steps = [partial(peer.decode_seconds, batch, CONTEXT, effort.steps) for peer in peers]
        for peer, seconds in zip(peers, by_turns(steps, effort.rounds), strict=True):
            name = f"decode, batch {batch}, {CONTEXT} tokens each: {peer.name}"
            results.append(Result(name, batch / seconds, "tokens/s"))
    return results


def by_turns(measures: Sequence[Callable[[], float]], num_rounds: int) -> list[float]:
    """The median of each, after a round that warms up."""
    rounds = [[measure() for measure in measures] for _ in range(1 + num_rounds)]
    return [statistics.median(found) for found in zip(*rounds[1:], strict=True)]

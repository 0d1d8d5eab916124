"""`jpd bench peers`: the engines beside other programs, same weights and lengths, one run.

1. Every program is loaded in a process of its own; the logits of a prompt are compared.
2. At batch 1, 8 and 32: prompts to their first tokens, then decode steps of rows that hold 512
   tokens; tokens per second of all rows. All take turns, so that a busy machine slows all.
3. A point has a limit and the run has one: what does not end in them is told as such, and so is a
   program that ends by itself.
Hugging Face transformers computes in float32 as jpd does on a CPU, and in bfloat16; llama.cpp
computes in the 4 bits of the file. Needs the extra `peers`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jpd.bench import llama_peer, transformers_peer
from jpd.bench.engine_rig import EngineRig, load_model
from jpd.bench.floor import check_plain
from jpd.bench.peer_process import DeadPeerError, LatePeerError, PeerProcess
from jpd.bench.results import Result, Say
from jpd.checkpoint.model_source import Model, open_model
from jpd.checkpoint.package_weights import cache_folder
from jpd.errors import ConfigError, Problem
from jpd.parallel.platform import enable_compilation_cache, ensure_cpu_devices

BATCHES = (1, 8, 32)
CONTEXT = 512
MAX_MODEL_LEN = 1024
MARGIN_TOKENS = 128
PROBE_TOKENS = (2, *range(100, 115))
OURS, LLAMA = "jpd float32", "llama.cpp, 4-bit arithmetic"


class Peer(Protocol):
    """Another program that prefills and decodes, or our own engines."""

    def prefill_seconds(self, num_tokens: int, num_prompts: int) -> float:
        """Prompts to their first tokens."""
        ...

    def decode_seconds(self, batch: int, context: int, num_steps: int) -> float:
        """Per step, of rows that all hold `context` tokens before the first."""
        ...


class Asked(Protocol):
    """A Peer in another process: `PeerProcess`."""

    @property
    def name(self) -> str: ...

    def ask(self, verb: str, arguments: tuple[object, ...], timeout_seconds: float) -> Any:
        """Raises LatePeerError and DeadPeerError."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How often things are measured, and what they may take."""

    rounds: int  # medians are over these; one more before them is not counted
    prompt_tokens: int  # of each prompt to be prefilled
    steps: int  # decode steps in a round
    point_seconds: float  # of each program, the round that is not counted included
    run_seconds: float  # of all together


FULL = Effort(rounds=5, prompt_tokens=512, steps=8, point_seconds=400.0, run_seconds=7200.0)
QUICK = Effort(rounds=2, prompt_tokens=128, steps=4, point_seconds=40.0, run_seconds=225.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that is measured of every peer."""

    name: str
    verb: str
    arguments: tuple[int, ...]
    num_tokens: int  # in the seconds that the peer tells


class OwnEngines:
    """A Peer like the others."""

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


def make_ours(model: str) -> OwnEngines:
    ensure_cpu_devices(1)
    enable_compilation_cache(cache_folder() / "xla")
    return OwnEngines(open_model(model), BATCHES)


def make_transformers(model: str, dtype: str) -> transformers_peer.TransformersPeer:
    return transformers_peer.TransformersPeer(open_model(model), dtype)


def is_any_installed() -> bool:
    return transformers_peer.is_installed() or llama_peer.is_installed()


def run(model: str, say: Say, *, is_quick: bool = False) -> list[Result]:
    """`say` hears what is done. Raises ConfigError without a peer, or for a model with experts."""
    effort = QUICK if is_quick else FULL
    end = time.monotonic() + effort.run_seconds
    if not is_any_installed():
        rule = "none is installed: pip install 'jpd[peers]'"
        raise ConfigError([Problem("jpd bench", "peers", "none", rule)])
    makers = find_peers(model)
    with ExitStack() as running:
        peers = [running.enter_context(PeerProcess(*named)) for named in makers.items()]
        say(f"loading {', '.join(peer.name for peer in peers)} ...")
        for peer in peers:
            peer.start()
        return compare_logits(peers, end) + side_by_side(peers, BATCHES, effort, say, end)


def find_peers(name: str) -> dict[str, Callable[[], Peer]]:
    """Our engines, and what is installed."""
    model = open_model(name)
    check_plain(model.config, model.name)
    makers: dict[str, Callable[[], Peer]] = {OURS: partial(make_ours, name)}
    if transformers_peer.is_installed():
        for dtype in transformers_peer.DTYPES:
            makers[f"transformers {dtype}"] = partial(make_transformers, name, dtype)
    location = Path(model.require_source().location)
    if llama_peer.is_installed() and location.suffix == ".gguf":
        makers[LLAMA] = partial(llama_peer.LlamaCppPeer, location, max(BATCHES), CONTEXT)
    return makers


def compare_logits(peers: Sequence[Asked], end: float) -> list[Result]:
    """That the weights are equal: how far logits are from those of the first peer, ours."""
    results, ours = list[Result](), None
    for peer in peers:
        if peer.name == LLAMA:
            continue  # with 4 bits they are others
        try:
            logits = peer.ask("logits", (PROBE_TOKENS,), end - time.monotonic())
        except (LatePeerError, DeadPeerError):
            continue
        if ours is None:
            ours = logits
        else:
            name = f"{peer.name}: largest difference of logits from jpd's"
            results.append(Result(name, float(np.abs(ours - logits).max()), ""))
    return results


def side_by_side(
    peers: Sequence[Asked], batches: Sequence[int], effort: Effort, say: Say, end: float
) -> list[Result]:
    """Tokens per second of each; of what did not end in its limit, that limit."""
    results = []
    for point in make_points(batches, effort):
        say(f"{point.name} ...")
        limit = max(0.0, min(effort.point_seconds, (end - time.monotonic()) / len(peers)))
        for peer, seconds in zip(peers, by_turns(point, peers, effort.rounds, limit), strict=True):
            name = f"{point.name}: {peer.name}"
            if isinstance(seconds, DeadPeerError):
                results.append(Result(f"{name}: ended by itself, status", seconds.status or 0, ""))
            elif limit == 0.0:
                results.append(Result(f"{name}: not begun in", effort.run_seconds, "s"))
            elif seconds is None:
                results.append(Result(f"{name}: not ended in", limit, "s"))
            else:
                results.append(Result(name, point.num_tokens / seconds, "tokens/s"))
    return results


def make_points(batches: Sequence[int], effort: Effort) -> list[Point]:
    points = []
    for batch in batches:
        length = effort.prompt_tokens
        prefill = f"prefill, batch {batch}, {length} tokens each"
        decode = f"decode, batch {batch}, {CONTEXT} tokens each"
        points += [
            Point(prefill, "prefill_seconds", (length, batch), length * batch),
            Point(decode, "decode_seconds", (batch, CONTEXT, effort.steps), batch),
        ]
    return points


def by_turns(
    point: Point, peers: Sequence[Asked], num_rounds: int, limit_seconds: float
) -> list[float | DeadPeerError | None]:
    """The median of each after a round that warms up; None for one without a round in its limit."""
    found: list[list[float]] = [[] for _ in peers]
    dead: dict[int, DeadPeerError] = {}
    left = [limit_seconds] * len(peers)
    for _ in range(1 + num_rounds):
        for place, peer in enumerate(peers):
            if left[place] <= 0.0:
                continue
            start = time.monotonic()
            try:
                found[place].append(peer.ask(point.verb, point.arguments, left[place]))
                left[place] -= time.monotonic() - start
            except LatePeerError:
                left[place] = 0.0
            except DeadPeerError as error:
                left[place], dead[place] = 0.0, error
    medians = [statistics.median(times[1:]) if len(times) > 1 else None for times in found]
    return [dead.get(place, median) for place, median in enumerate(medians)]

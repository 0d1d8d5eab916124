"""How large KV is and how long links take for it: arithmetic on model cards, nothing measured.

And what of a transfer shows: KV of all chunks but the last travels while later chunks are computed;
of the last one, all of it, or with layer groups only the last group's. Figures are for one H200.
"""

from dataclasses import dataclass

from jpd.bench.results import Result
from jpd.checkpoint.model_source import open_model
from jpd.nn.config import DecoderConfig
from jpd.nn.params import abstract_params
from jpd.transfer.plan import LINKS, Link, kv_bytes_per_token

MODELS = ("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "deepseek-v3")
PROMPT_TOKENS = (2048, 32768)
BYTES_PER_NUMBER = 2
MIB, MILLI = 1 << 20, 1e-3

OVERLAP_MODEL = "llama-3.1-8b"
OVERLAP_PROMPTS = (512, 2048, 8192, 32768)
CHUNK_TOKENS = 2048
FLOPS_PER_SECOND = 0.4 * 989e12
"""NVIDIA H200 data sheet, bfloat16 dense, of which a good prefill reaches about two fifths."""
CALL_SECONDS = 200e-6
"""Of one more dispatch and its gathers, per layer group: the upper end of what is seen."""
LAYER_GROUPS = (2, 4, 8)


def link_results() -> list[Result]:
    """KV of a prompt in 16 bits, and its time over each link at peak rate, without overlap."""
    results = []
    for name in MODELS:
        token_bytes = kv_bytes_per_token(_config(name), BYTES_PER_NUMBER)
        for num_tokens in PROMPT_TOKENS:
            what, num_bytes = f"{name}, {num_tokens // 1024}K tokens", token_bytes * num_tokens
            results.append(Result(f"KV of {what}", num_bytes / MIB, "MiB"))
            results += [
                Result(f"KV of {what} over {link.name}", link.seconds(num_bytes) / MILLI, "ms")
                for link in LINKS
            ]
    return results


@dataclass(frozen=True, slots=True)
class Overlap:
    """What of a prompt's transfer shows after its last chunk, and what is hidden behind compute."""

    exposed_seconds: float
    hidden_seconds: float


def overlap(
    num_tokens: int,
    link: Link,
    token_bytes: int,
    token_seconds: float,
    *,
    chunk: int = CHUNK_TOKENS,
    groups: int = 1,
    call_seconds: float = CALL_SECONDS,
) -> Overlap:
    """Pieces leave as soon as they are computed and wait for those before them.

    With layer groups each chunk is `groups` calls, each of which costs `call_seconds` more.
    """
    ready = arrived = 0.0
    for start in range(0, num_tokens, chunk):
        size = min(chunk, num_tokens - start)
        for _ in range(groups):
            ready += size * token_seconds / groups + (call_seconds if groups > 1 else 0.0)
            arrived = max(arrived, ready) + link.seconds(size * token_bytes / groups)
    total = link.seconds(num_tokens * token_bytes)
    computed = num_tokens * token_seconds  # what it takes without groups: their cost shows
    exposed = arrived - computed
    return Overlap(exposed, max(0.0, round(total - exposed, 12)))


def exposed_results() -> list[Result]:
    """By prompt length and link, by chunk alone; and the shortest prompt for which groups pay."""
    config = _config(OVERLAP_MODEL)
    token_bytes = kv_bytes_per_token(config, BYTES_PER_NUMBER)
    token_seconds = 2.0 * abstract_params(config, "bfloat16").num_params / FLOPS_PER_SECOND
    results = []
    for link in LINKS:
        for num_tokens in OVERLAP_PROMPTS:
            found = overlap(num_tokens, link, token_bytes, token_seconds)
            name = f"{OVERLAP_MODEL}, {num_tokens:,} tokens, {link.name}, worked out"
            results.append(Result(f"{name}: exposed", found.exposed_seconds / MILLI, "ms"))
            results.append(Result(f"{name}: hidden", found.hidden_seconds / MILLI, "ms"))
        for groups in LAYER_GROUPS:
            crossover = crossover_tokens(link, token_bytes, token_seconds, groups)
            name = f"{OVERLAP_MODEL}, {link.name}, worked out: {groups} layer groups would pay from"
            results.append(Result(name, crossover, "tokens"))
    return results


def crossover_tokens(
    link: Link,
    token_bytes: int,
    token_seconds: float,
    groups: int,
    *,
    call_seconds: float = CALL_SECONDS,
    limit: int = CHUNK_TOKENS,
) -> float:
    """The shortest prompt whose KV is complete earlier with groups; infinite within one chunk."""
    for num_tokens in range(16, limit + 1, 16):
        alone = overlap(num_tokens, link, token_bytes, token_seconds)
        grouped = overlap(
            num_tokens, link, token_bytes, token_seconds, groups=groups, call_seconds=call_seconds
        )
        if grouped.exposed_seconds < alone.exposed_seconds:
            return float(num_tokens)
    return float("inf")


def _config(name: str) -> DecoderConfig:
    return open_model(name, need_weights=False).config

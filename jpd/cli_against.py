"""`jpd verify --against float32`: how much rounding the weights moves the logits.

1. The same weights as float32 continue each prompt greedily; logits of prompt and continuation.
2. The weights as they are served give their logits at the same positions.
So one token that differs does not make all that follow differ. Called by `cli_verify`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jpd.api import launch
from jpd.checkpoint.model_source import Model, with_weights
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem

ATOL = 4.0
"""Largest logit difference that passes by default. Measured with int8 Gemma 3 270M: 2.33."""

TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "In 1969, the first people landed on the Moon. The mission was called",
)

Prompt = str | list[int]
Logits = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Exact:
    """What float32 weights give."""

    sequences: list[list[int]]  # prompts and continuations
    logits: Logits
    num_greedy: list[int]  # tokens of each continuation


def verify_against(
    model: Model,
    deployment: DeploymentConfig,
    prompts: Sequence[Prompt],
    max_tokens: int,
    atol: float,
) -> int:
    """Run both, print how far apart they are; 1 when that is above `atol`."""
    dtype = deployment.engine.dtype
    served = "int8" if model.config.weights == "int8" else dtype
    if served == "float32":
        rule = "the weights are served as float32 already: give --weights int8"
        raise ConfigError([Problem("--against", "weights", served, rule)])
    exact = _run_exact(with_weights(model, "float"), deployment, prompts, max_tokens)
    with launch(model, deployment) as server:
        logits = [server.logits(sequence) for sequence in exact.sequences]
    return report(served, exact, logits, atol)


def report(served: str, exact: Exact, logits: Logits, atol: float) -> int:
    """Print the comparison; the exit code."""
    pairs = list(zip(exact.logits, logits, strict=True))
    largest = max(float(np.abs(one - other).max()) for one, other in pairs)
    mean = float(np.mean([np.abs(one - other).mean() for one, other in pairs]))
    num_equal = sum(
        int(np.sum(one[-1 - count : -1].argmax(-1) == other[-1 - count : -1].argmax(-1)))
        for (one, other), count in zip(pairs, exact.num_greedy, strict=True)
    )
    greedy = f"greedy {num_equal}/{sum(exact.num_greedy)}"
    print(f"{served}: max |Δlogit| = {largest:.3g}, mean {mean:.3g}, {greedy} against float32")
    is_close = largest <= atol  # False for NaN
    if not is_close:
        print(f"differs: max |Δlogit| is above --atol {atol:g}")
    return 0 if is_close else 1


def _run_exact(
    model: Model, deployment: DeploymentConfig, prompts: Sequence[Prompt], max_tokens: int
) -> Exact:
    wide = {"dtype": "float32"}
    with launch(model, deployment, engine=wide, cache=wide) as server:
        answers = server.generate(prompts, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        starts = [_token_ids(model, prompt) for prompt in prompts]
        sequences = [
            start + list(answer.token_ids) for start, answer in zip(starts, answers, strict=True)
        ]
        logits = [server.logits(sequence) for sequence in sequences]
    return Exact(sequences, logits, [len(answer.token_ids) for answer in answers])


def _token_ids(model: Model, prompt: Prompt) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    assert model.tokenizer is not None  # or `generate` had refused the text
    return list(model.tokenizer.encode(prompt, add_special_tokens=True))

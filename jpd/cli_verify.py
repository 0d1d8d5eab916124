"""`jpd verify`: the same prompts coupled and disaggregated, or a checkpoint against a reference.

Both ways go through one fleet and the same compiled functions: coupled means that the decode worker
prefills by itself and nothing travels. Exits 1 on any difference.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from jpd.api import Server, launch
from jpd.checkpoint.model_source import Model
from jpd.cli_against import ATOL as AGAINST_ATOL
from jpd.cli_against import TEXTS, verify_against
from jpd.cli_arguments import count, not_negative
from jpd.cli_pair import add_pair_arguments, load_pair, parse_prompt
from jpd.cli_progress import ProgressLine
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem

HELP = "are disaggregated tokens the coupled ones? With --golden: is the checkpoint computed right?"
GOLDEN_ATOL = 2e-4
MARGIN = 1e-3
"""Below this gap between the two best logits, float32 rounding may choose either."""

Prompt = str | list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt a line: text, or a list of ids"
    )
    parser.add_argument("--max-tokens", type=count, default=32, metavar="N", help="default 32")
    parser.add_argument(
        "--golden", type=Path, metavar="NPZ", help="reference prompts, logits, greedy, margins"
    )
    parser.add_argument(
        "--against",
        choices=("float32",),
        help="how far are the logits of these weights, as they are served, from float32 ones?",
    )
    parser.add_argument(
        "--atol",
        type=not_negative,
        help=f"largest logit difference, default {GOLDEN_ATOL:g}; {AGAINST_ATOL:g} with --against",
    )


def run(options: argparse.Namespace) -> int:
    if options.golden and options.against:
        rule = "asks for another comparison than --golden: give one of them"
        raise ConfigError([Problem("jpd verify", "--against", options.against, rule)])
    golden = read_golden(options.golden) if options.golden else None
    texts = read_prompts(options.prompts) if options.prompts else None
    model, deployment = load_pair(options)
    if options.against:
        prompts = texts or _known_prompts(model, deployment, options)
        atol = AGAINST_ATOL if options.atol is None else options.atol
        return verify_against(model, deployment, prompts, options.max_tokens, atol)
    if golden is None:
        _check_can_disaggregate(deployment)
    # Without a prefix cache, or the second way would find pages that the first one left.
    cold = {"retain_seconds": 0.0}
    progress = ProgressLine()
    with launch(
        model, deployment, cache=cold, can_prefill_locally=True, progress=progress
    ) as server:
        if golden is not None:
            atol = GOLDEN_ATOL if options.atol is None else options.atol
            return verify_golden(server, golden, atol, _has_prefill(deployment))
        prompts = texts or built_in_prompts(model, server.max_model_len, deployment, options)
        return verify_paths(server, prompts, options.max_tokens)


@dataclass(frozen=True, slots=True)
class Golden:
    """What a reference implementation computed."""

    prompts: np.ndarray  # int32 [R, T]
    logits: np.ndarray  # float32 [R, T, V]
    greedy: np.ndarray  # int32 [R, N]
    margins: np.ndarray  # float32 [R, N]


def read_golden(path: Path) -> Golden:
    """Raises ConfigError when the file is missing, no npz, or its arrays do not go together."""
    names = ("prompts", "logits", "greedy", "margins")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            golden = Golden(*(arrays[name] for name in names))
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        why = f": {error.strerror}" if isinstance(error, OSError) else ""
        rule = f"must be an npz file with the arrays {', '.join(names)}{why}"
        raise ConfigError([Problem(str(path), "--golden", path.name, rule)]) from error
    rows, length = golden.prompts.shape if golden.prompts.ndim == 2 else (-1, -1)
    fits = golden.logits.shape[:2] == (rows, length) and golden.greedy.shape[:1] == (rows,)
    if not fits or golden.margins.shape != golden.greedy.shape or golden.logits.ndim != 3:
        shapes = {name: getattr(golden, name).shape for name in names}
        rule = "must be prompts [R, T], logits [R, T, V], greedy [R, N], margins [R, N]"
        raise ConfigError([Problem(str(path), "shapes", shapes, rule)])
    return golden


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line; a line that is a JSON list holds token ids. Blank lines do not count."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), "--prompts", path.name, str(error))]) from error
    if not lines:
        raise ConfigError([Problem(str(path), "--prompts", path.name, "holds no prompt")])
    return [parse_prompt(line) for line in lines]


def built_in_prompts(
    model: Model, max_model_len: int, deployment: DeploymentConfig, options: argparse.Namespace
) -> list[Prompt]:
    """Token ids at the lengths where paging goes wrong first: around pages and chunks."""
    page, chunk = deployment.cache.page_size, deployment.engine.prefill_chunk
    room = max_model_len - options.max_tokens
    edges = (1, 2, page - 1, page, page + 1, 2 * page, chunk - 1, chunk, chunk + 1, 2 * chunk + 3)
    lengths = sorted({length for length in edges if 1 <= length <= room})
    draw = np.random.default_rng(0)
    return [draw.integers(0, model.config.vocab_size, length).tolist() for length in lengths]


def _known_prompts(
    model: Model, deployment: DeploymentConfig, options: argparse.Namespace
) -> list[Prompt]:
    """Text where the model reads text: random ids are nothing a model was made for."""
    if model.tokenizer is not None:
        return list(TEXTS)
    max_model_len = deployment.engine.served_len(model.config.max_len)
    return built_in_prompts(model, max_model_len, deployment, options)


def verify_paths(server: Server, prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Print `identical: N/N` or the first difference of each prompt that has one."""
    coupled, apart = (
        server.generate(prompts, max_tokens=max_tokens, temperature=0.0, disaggregate=choice)
        for choice in (False, True)
    )
    num_identical = 0
    for number, (one, other) in enumerate(zip(coupled, apart, strict=True), 1):
        step = first_difference(one.token_ids, other.token_ids)
        num_identical += step is None
        if step is not None:
            tokens = " and ".join(
                f"{name} {_token_at(answer.token_ids, step)}"
                for name, answer in (("coupled", one), ("disaggregated", other))
            )
            where = f"prompt {number} ({one.num_prompt_tokens} tokens), output token {step + 1}"
            print(f"differs: {where}: {tokens}")
    print(f"identical: {num_identical}/{len(prompts)}")
    return 0 if num_identical == len(prompts) else 1


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that is not the same, None when the answers are equal."""
    for step, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return step
    return None if len(one) == len(other) else min(len(one), len(other))


def _token_at(token_ids: Sequence[int], step: int) -> str:
    return str(token_ids[step]) if step < len(token_ids) else "(ended)"


def verify_golden(server: Server, golden: Golden, atol: float, disaggregate: bool) -> int:
    """Logits from prefill, greedy tokens through prefill, transfer and decode."""
    prompts = [row.tolist() for row in golden.prompts]
    logits = np.stack([server.logits(prompt) for prompt in prompts])
    if logits.shape != golden.logits.shape:
        rule = f"the model's logits are {logits.shape}"
        raise ConfigError([Problem("--golden", "logits", golden.logits.shape, rule)])
    delta = float(np.max(np.abs(logits - golden.logits)))
    answers = server.generate(
        prompts,
        max_tokens=golden.greedy.shape[1],
        temperature=0.0,
        ignore_eos=True,
        disaggregate=True if disaggregate else None,
    )
    num_equal, wrong = 0, []
    for row, answer in enumerate(answers):
        count, step = compare_greedy(answer.token_ids, golden.greedy[row], golden.margins[row])
        num_equal += count
        if step is not None:
            got, expected = _token_at(answer.token_ids, step), golden.greedy[row, step]
            wrong.append(f"prompt {row + 1}, output token {step + 1}: {got}, expected {expected}")
    print(f"golden: max |Δlogit| = {delta:.3g}, greedy {num_equal}/{golden.greedy.size}")
    for line in wrong:
        print(f"differs: {line}")
    is_close = delta <= atol  # False for NaN
    if not is_close:
        print(f"differs: max |Δlogit| is above --atol {atol:g}")
    return 0 if is_close and not wrong else 1


def compare_greedy(
    token_ids: Sequence[int], expected: np.ndarray, margins: np.ndarray
) -> tuple[int, int | None]:
    """How many tokens are equal, and the first one that is wrong though the margin was clear.

    After a near tie that went the other way the texts differ: the rest is not compared.
    """
    for step, (token, margin) in enumerate(zip(expected, margins, strict=True)):
        if step >= len(token_ids) or token_ids[step] != token:
            is_tie = margin <= MARGIN and step < len(token_ids)
            return step, None if is_tie else step
    return len(expected), None


def _has_prefill(deployment: DeploymentConfig) -> bool:
    return any(worker.role == "prefill" for worker in deployment.workers)


def _check_can_disaggregate(deployment: DeploymentConfig) -> None:
    if not _has_prefill(deployment):
        roles = sorted({worker.role for worker in deployment.workers})
        rule = "nothing is disaggregated here: verify needs a prefill and a decode worker"
        raise ConfigError([Problem(deployment.file, "worker.role", roles, rule)])

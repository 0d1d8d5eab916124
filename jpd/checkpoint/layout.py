"""Which tensors of a checkpoint fill which parameters, and everything that can be wrong with them.

All of it is found from names, shapes and numbers on the host, before any device memory is taken.
Knows no device. Called by `load` and `convert`.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from jpd.checkpoint.progress import ProgressCallback, ProgressMeter
from jpd.checkpoint.source import TensorSource, full_slices, num_not_finite, row_blocks
from jpd.errors import ConfigError, Problem
from jpd.nn.config import DecoderConfig
from jpd.nn.families import FAMILIES
from jpd.nn.params import AbstractParams
from jpd.nn.tensor_ref import TensorRef

logger = logging.getLogger(__name__)

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
CHECK_THREADS = 4

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers that old checkpoints carry; they are computed, not learnt."""

LAYER_NAME = re.compile(r"(?P<prefix>(?:.+\.)?layers)\.(?P<layer>\d+)\.")


def param_refs(
    source: TensorSource, config: DecoderConfig, abstract: AbstractParams
) -> Mapping[str, TensorRef]:
    """Where each parameter but scales is. Raises ConfigError with all faults of tensors."""
    refs = FAMILIES[config.family].tensors(config)
    problems: list[Problem] = []
    for spec in abstract.specs:
        if spec.is_scale:
            continue
        ref = refs[spec.path]
        assert ref.shape == spec.shape, f"{spec.path}: {ref.shape} is not {spec.shape}"
        problems.extend(_shape_problems(source, ref))
    if problems:
        raise ConfigError(distinct(problems))
    used = {name for ref in refs.values() for name in ref.names}
    extra = {name for name in source.names - used if not name.endswith(IGNORED_SUFFIXES)}
    if problems := _extra_in_layers(source, config, used, extra):
        raise ConfigError(problems)
    _warn_of_extra(source, config, extra)
    return refs


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Each fault once, though several parameters met it."""
    return list({str(problem): problem for problem in problems}.values())


def _shape_problems(source: TensorSource, ref: TensorRef) -> list[Problem]:
    problems = []
    for name in ref.names:
        if name not in source.names:
            rule = f"the model needs this tensor, of shape {list(ref.file_shape)}{_hint(name)}"
            problems.append(Problem(source.location, name, "missing", rule))
            continue
        shape, dtype = source.info(name)
        if shape != tuple(ref.file_shape):
            rule = f"the config asks for shape {list(ref.file_shape)}"
            problems.append(Problem(source.file_of(name), name, list(shape), rule))
        elif dtype.kind not in "fV" or dtype == np.bool_:
            rule = "weights must be floating-point numbers"
            problems.append(Problem(source.file_of(name), name, str(dtype), rule))
    return problems


def _hint(name: str) -> str:
    return " (the config does not tie it to the embeddings)" if name == HEAD else ""


def _extra_in_layers(
    source: TensorSource, config: DecoderConfig, used: set[str], extra: set[str]
) -> list[Problem]:
    """Tensors of the decoder's layers that it does not use: config and weights disagree."""
    found = (LAYER_NAME.match(name) for name in used)
    prefixes = {match["prefix"] for match in found if match}
    problems = []
    for name in sorted(extra):
        match = LAYER_NAME.match(name)
        if match is None or match["prefix"] not in prefixes:
            continue
        if int(match["layer"]) < config.num_layers:
            rule = "a layer of this config has no such tensor, though it would change the result"
        elif FAMILIES[config.family].has_layers_beyond:
            continue
        else:
            rule = f"the config has {config.num_layers} layers"
        shape = list(source.info(name).shape)
        problems.append(Problem(source.file_of(name), name, shape, rule))
    return problems


def _warn_of_extra(source: TensorSource, config: DecoderConfig, extra: set[str]) -> None:
    """Of tensors outside the decoder; a head beside tied embeddings is compared with them."""
    if config.tied_embeddings and HEAD in extra:
        extra = extra - {HEAD}
        if not _equal_tensors(source, HEAD, EMBED):
            message = "%s: %s differs from the embeddings it is tied to; the embeddings are used"
            logger.warning(message, source.file_of(HEAD), HEAD)
    if extra:
        message = "%s: %d tensors are not part of this model and are ignored, e.g. %s"
        logger.warning(message, source.location, len(extra), min(extra))


def _equal_tensors(source: TensorSource, left: str, right: str) -> bool:
    if source.info(left).shape != source.info(right).shape:
        return False
    for slices in row_blocks(source.info(left).shape):
        if not np.array_equal(source.read_slice(left, slices), source.read_slice(right, slices)):
            return False
    return True


def check_values(
    source: TensorSource, refs: Mapping[str, TensorRef], progress: ProgressCallback | None = None
) -> None:
    """Read every tensor in small blocks. Raises ConfigError naming those with NaN or infinities."""
    names = sorted({name for ref in refs.values() for name in ref.names})
    sizes = {name: _num_bytes(source, name) for name in names}
    meter = ProgressMeter("checking", sum(sizes.values()), progress)
    problems = []
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        for name, count in zip(names, pool.map(partial(_count_bad, source), names), strict=True):
            meter.add(sizes[name], name)
            if count:
                value = f"{count} of {np.prod(source.info(name).shape)} numbers"
                rule = "weights must not be NaN or infinite"
                problems.append(Problem(source.file_of(name), name, value, rule))
    if problems:
        raise ConfigError(problems)


def _count_bad(source: TensorSource, name: str) -> int:
    shape = source.info(name).shape
    blocks = row_blocks(shape) if shape else [full_slices(shape)]
    return sum(num_not_finite(source.read_slice(name, slices)) for slices in blocks)


def _num_bytes(source: TensorSource, name: str) -> int:
    shape, dtype = source.info(name)
    return int(np.prod(shape)) * dtype.itemsize

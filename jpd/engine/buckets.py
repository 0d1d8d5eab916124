"""The padded shapes the engines compile for: few, fixed at start, printed by `jpd check`.

Tokens of a prefill chunk, rows of a decode step, width of the page table, pages moved at once. Pure
arithmetic, no jax. Used by the engines, the planner and the worker.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jpd.config import CacheConfig, EngineConfig
from jpd.errors import ConfigError, Problem
from jpd.nn.config import LayerConfig
from jpd.nn.layer_groups import LayerGroups, layer_groups

MAX_EXECUTABLES = 96
"""Start refuses more: each takes seconds to compile, and padding gains little beyond a few."""

MIN_PREFILL_BUCKET = 16

CHUNK_ROWS = 4
"""Prompts that can share a chunk; its rows have no fewer than MIN_PREFILL_BUCKET tokens."""

SHRINKS = (1, 4, 16)
"""Default buckets: the largest size, a quarter and a sixteenth of it."""


class ChunkLayout(NamedTuple):
    """How a prefill chunk is cut: each row is a part of one prompt."""

    num_rows: int
    row_length: int  # tokens

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.row_length


class ChunkShape(NamedTuple):
    """The padded sizes of a chunk; one executable of the model each."""

    num_rows: int
    row_length: int  # tokens
    width: int  # pages of each row's page table


class DecodeShape(NamedTuple):
    """The sizes of a decode call."""

    num_rows: int  # slots from the first on
    width: int  # pages of each row's page table
    num_steps: int  # tokens of each row
    num_drafts: int = 0  # verified in the one step: up to 1 + num_drafts tokens of each row

    @property
    def is_one_step(self) -> bool:
        """One token of each row: the executable that chooses it is shared by all widths."""
        return self.num_steps == 1 and self.num_drafts == 0


def _ceil_to(value: int, step: int) -> int:
    return -(-value // step) * step


def _smallest_at_least(buckets: Sequence[int], value: int, name: str) -> int:
    for bucket in buckets:
        if bucket >= value:
            return bucket
    raise ValueError(f"{name} {value} exceeds the largest bucket {buckets[-1]}")


@dataclass(frozen=True, slots=True)
class ShapeBuckets:
    """All ascending. The largest context width holds max_model_len tokens."""

    page_size: int
    prefill_lengths: tuple[int, ...]  # tokens of a chunk
    context_widths: tuple[int, ...]  # pages of a page table
    page_moves: tuple[int, ...]  # pages gathered or scattered in one call
    decode_steps: tuple[int, ...] = (1,)  # steps of a decode call
    max_drafts: int = 0  # tokens that a step verifies beside its own; 0: nobody speculates
    layer_groups: LayerGroups = LayerGroups()  # of a prefill chunk, which are calls of their own

    @classmethod
    def from_config(
        cls,
        engine: EngineConfig,
        cache: CacheConfig,
        max_model_len: int,
        layers: Sequence[LayerConfig] = (),
    ) -> "ShapeBuckets":
        """The buckets of a deployment. Raises ConfigError when they do not fit or are too many.

        `layers` are the model's; they matter where chunks are run in groups of them.
        """
        problems = _check(engine, cache, max_model_len, len(layers))
        if problems:
            raise ConfigError(problems)
        page = cache.page_size
        longest = _ceil_to(max_model_len, page)
        chunk = min(engine.prefill_chunk, longest)
        lengths = engine.prefill_buckets or [
            max(chunk // part, min(MIN_PREFILL_BUCKET, chunk)) for part in SHRINKS
        ]
        contexts = engine.context_buckets or [max(longest // part, chunk) for part in SHRINKS]
        widths = {_ceil_to(size, page) // page for size in contexts if size <= longest}
        moves = {1 << bit for bit in range((chunk // page).bit_length())} | {-(-chunk // page)}
        buckets = cls(
            page_size=page,
            prefill_lengths=tuple(sorted({size for size in lengths if size < chunk} | {chunk})),
            context_widths=tuple(sorted(widths | {longest // page})),
            page_moves=tuple(sorted(moves)),
            decode_steps=tuple(sorted({1, engine.max_steps_per_call or 1})),
            max_drafts=engine.max_speculative_tokens,
            layer_groups=(
                LayerGroups()
                if engine.layer_groups == 1
                else layer_groups(layers, engine.layer_groups)
            ),
        )
        buckets._check_count()
        return buckets

    @property
    def prefill_chunk(self) -> int:
        """The most prompt tokens computed in one call."""
        return self.prefill_lengths[-1]

    @property
    def max_pages(self) -> int:
        """The most pages of one sequence."""
        return self.context_widths[-1]

    @property
    def prefill_layouts(self) -> tuple[ChunkLayout, ...]:
        """Ascending by size. The largest is cut in rows, others there are both cut and whole.

        On CPU a prompt alone is up to a third faster in a whole one of 128 tokens, but not of 512.
        """
        layouts = []
        for length in self.prefill_lengths:
            is_cut = length % CHUNK_ROWS == 0 and length // CHUNK_ROWS >= MIN_PREFILL_BUCKET
            if length < self.prefill_chunk or not is_cut:
                layouts.append(ChunkLayout(1, length))
            if is_cut:
                layouts.append(ChunkLayout(CHUNK_ROWS, length // CHUNK_ROWS))
        return tuple(layouts)

    @property
    def prefill_shapes(self) -> tuple[ChunkShape, ...]:
        """Of every chunk."""
        widths = self.context_widths
        return tuple(ChunkShape(*layout, w) for layout in self.prefill_layouts for w in widths)

    @property
    def num_prefill_executables(self) -> int:
        """The model, the choice of first tokens, log-probabilities of prompts, pages that leave.

        In layer groups the model is each kind of group, the embedding and the logits.
        """
        layouts, groups = self.prefill_layouts, self.layer_groups
        num_choices = len({layout.num_rows for layout in layouts})
        num_models = len(self.prefill_shapes) * groups.num_kinds
        num_models += 0 if groups.is_whole else 2 * len(layouts)
        return num_models + num_choices + len(layouts) + self._num_page_moves

    @property
    def num_decode_executables(self) -> int:
        """At most: steps, choices, insert, remove, new pages of rows, and the pages that arrive."""
        num_kinds = len(self.decode_steps) + (self.max_drafts > 0)
        num_steps = len(SHRINKS) * len(self.context_widths) * num_kinds
        return num_steps + len(SHRINKS) + 3 + self._num_page_moves

    @property
    def _num_page_moves(self) -> int:
        """Each number of pages, with each number of layers."""
        return len(self.page_moves) * self.layer_groups.num_sizes

    @property
    def max_decode_steps(self) -> int:
        """The most steps of one decode call."""
        return self.decode_steps[-1]

    def decode_shapes(self, num_slots: int) -> tuple[DecodeShape, ...]:
        """Of every decode call of a worker with so many slots."""
        kinds = [(num_steps, 0) for num_steps in self.decode_steps]
        if self.max_drafts:
            kinds.append((1, self.max_drafts))
        sizes = itertools.product(decode_rows(num_slots), self.context_widths, kinds)
        return tuple(DecodeShape(rows, width, *kind) for rows, width, kind in sizes)

    def chunk_layout(self, num_tokens: int) -> ChunkLayout:
        """The smallest one for so many tokens of one prompt."""
        length = _smallest_at_least(self.prefill_lengths, num_tokens, "chunk of tokens")
        return next(found for found in self.prefill_layouts if found.num_tokens == length)

    def context_width(self, num_tokens: int) -> int:
        """Pages of the smallest table that holds this many tokens."""
        num_pages = -(-num_tokens // self.page_size)
        return _smallest_at_least(self.context_widths, num_pages, "page table of pages")

    def _check_count(self) -> None:
        count = self.num_prefill_executables + self.num_decode_executables
        if count > MAX_EXECUTABLES:
            key = "engine.prefill_buckets x context_buckets"
            shown = f"{self.prefill_lengths} x {self.context_widths}"
            rule = f"{count} executables to compile, at most {MAX_EXECUTABLES}: use fewer buckets"
            if not self.layer_groups.is_whole:
                key += " x kinds of layer_groups"
                shown += f" x {self.layer_groups.num_kinds}"
                rule += " or other layer_groups"
            raise ConfigError([_problem(key, shown, rule)])


def decode_rows(num_slots: int) -> tuple[int, ...]:
    """How many slots, from the first on, a decode step may compute."""
    return tuple(sorted({max(1, num_slots // part) for part in SHRINKS} if num_slots else ()))


def _problem(key: str, value: object, rule: str) -> Problem:
    return Problem("mesh file", key, value, rule)


def _check(
    engine: EngineConfig, cache: CacheConfig, max_model_len: int, num_layers: int
) -> list[Problem]:
    problems = []
    if engine.layer_groups != 1 and not 1 <= engine.layer_groups <= num_layers:
        rule = f"must be between 1 and the model's {num_layers} layers"
        problems.append(_problem("engine.layer_groups", engine.layer_groups, rule))
    if engine.prefill_chunk % cache.page_size:
        rule = f"must be a multiple of cache.page_size = {cache.page_size}"
        problems.append(_problem("engine.prefill_chunk", engine.prefill_chunk, rule))
    for size in engine.prefill_buckets:
        if not 1 <= size <= engine.prefill_chunk:
            rule = f"must be between 1 and engine.prefill_chunk = {engine.prefill_chunk}"
            problems.append(_problem("engine.prefill_buckets", size, rule))
    for size in engine.context_buckets:
        if size < 1:
            problems.append(_problem("engine.context_buckets", size, "must be at least 1"))
    if max_model_len < 2:
        rule = "must be at least 2: a prompt token and an output token"
        problems.append(_problem("engine.max_model_len", max_model_len, rule))
    return problems

"""Chunks run in layer groups: the tokens of whole chunks, in pieces that leave in between."""

import itertools

import jax
import numpy as np
import pytest

from jpd.config import EngineConfig
from jpd.engine.compile_counter import CompileCounter
from jpd.engine.prefill import PrefillEngine, PrefillTask
from jpd.transfer.protocol import KVPiece
from tests.engine.pair import DESTINATION, Pair
from tests.engine.rig import (
    CHUNK,
    GREEDY,
    MAX_LEN,
    PAGE,
    expected,
    random_prompt,
    rig,
    run_prefill,
)

ONE_KIND = EngineConfig(
    prefill_chunk=CHUNK,
    prefill_buckets=(CHUNK,),
    context_buckets=(MAX_LEN,),
    max_model_len=MAX_LEN,
    layer_groups=3,
)
"""Three layers, each a group: alike in llama3."""


def test_groups_equal_whole_chunks() -> None:
    """Of one model; test_every_family.py has all of them, on meshes of every size."""
    source, golden = rig("llama3", engine=ONE_KIND), expected("llama3")
    joined = Pair(source, rig("llama3", first_device=4))
    for index, prompt in enumerate(golden["prompts"]):
        joined.add(str(index), tuple(prompt.tolist()), GREEDY)
    assert joined.run() == {str(i): row.tolist() for i, row in enumerate(golden["greedy"])}


@pytest.mark.parametrize(("num_tokens", "send_from_page"), [(100, 0), (65, 2), (10, 0), (64, 4)])
def test_every_layer_of_every_page_leaves_once(num_tokens: int, send_from_page: int) -> None:
    on = rig("llama3", engine=ONE_KIND)
    pages = on.take(num_tokens)
    task = PrefillTask(
        "a",
        random_prompt(1, num_tokens),
        pages,
        0,
        GREEDY,
        destination=DESTINATION,
        send_from_token=send_from_page * PAGE,
    )
    on.pieces.clear()
    run_prefill(on.prefill_engine(**{DESTINATION: on.wire_to(on)}), task)
    sent = [place for piece in on.pieces for place in itertools.product(piece.layers, piece.pages)]
    assert sorted(sent) == list(itertools.product(range(3), range(send_from_page, len(pages))))
    assert [piece.is_last for piece in on.pieces[:-1]] == [False] * max(0, len(on.pieces) - 1)
    assert all(piece.is_last for piece in on.pieces[-1:])
    spec = on.cache.spec
    for piece in on.pieces:
        assert piece.num_bytes == piece.num_pages * spec.page_bytes // spec.num_layers
        ids = list(pages[piece.pages.start : piece.pages.stop])
        for staged, layer in zip(piece.arrays, on.cache.part(piece.layers), strict=True):
            assert np.array_equal(np.asarray(staged)[: len(ids)], np.asarray(layer)[ids])
    on.allocator.free(pages)


def test_cached_pages_leave_with_all_their_layers() -> None:
    on, prompt = rig("llama3", engine=ONE_KIND), random_prompt(2, 3 * PAGE)
    pages = on.take(len(prompt))
    first = PrefillTask("first", prompt, pages, 0, GREEDY)
    again = PrefillTask("again", prompt, pages, 2 * PAGE, GREEDY, destination=DESTINATION)
    engine = on.prefill_engine(**{DESTINATION: on.wire_to(on)})
    run_prefill(engine, first)
    on.pieces.clear()
    run_prefill(engine, again)
    sent = [place for piece in on.pieces for place in itertools.product(piece.layers, piece.pages)]
    assert sorted(sent) == list(itertools.product(range(3), range(3)))
    on.allocator.free(pages)


def test_pages_of_a_group_leave_before_the_next_group_is_dispatched() -> None:
    on = rig("llama3", engine=ONE_KIND)
    written: list[tuple[int, list[bool]]] = []
    before: tuple[jax.Array, ...] = ()

    def note(piece: KVPiece) -> None:
        """Whose pages have been given to an executable by now."""
        written.append((piece.layer_start, [layer.is_deleted() for layer in before]))

    engine = PrefillEngine(on.functions, on.cache, on.leaves, note, {DESTINATION: on.wire_to(on)})
    pages, before = on.take(PAGE), on.cache.layers
    task = PrefillTask("a", random_prompt(3, PAGE), pages, 0, GREEDY, destination=DESTINATION)
    run_prefill(engine, task)
    assert written == [
        (0, [True, False, False]),
        (1, [True, True, False]),
        (2, [True, True, True]),
    ]
    on.allocator.free(pages)


def test_groups_of_one_kind_are_one_executable_and_nothing_compiles_after_warm_up() -> None:
    source, target = rig("llama3", engine=ONE_KIND), rig("llama3", first_device=4)
    buckets, chunk = source.functions.buckets, []
    lowered = source.functions.lower_prefill(source.leaves, source.cache.layers)
    for one in lowered:
        chunk.append(one)
    num_moves = len(buckets.page_moves)
    assert len(chunk) == buckets.num_prefill_executables - num_moves
    assert sum("forward_group" in one.as_text()[:200] for one in chunk) == len(
        buckets.prefill_shapes
    )
    joined = Pair(source, target)
    joined.prefill.warm_up()
    joined.decode.warm_up()
    with CompileCounter() as counter:
        counter.mark_ready()
        for number, num_tokens in enumerate((1, 15, 16, 17, 33, 64, 200)):
            joined.add(str(number), random_prompt(number, num_tokens), GREEDY)
            joined.run()
    assert counter.num_after_ready == 0


def test_pages_are_updated_in_place() -> None:
    on = rig("llama3", engine=ONE_KIND)
    old, pages = on.cache.layers, on.take(PAGE)
    run_prefill(on.prefill_engine(), PrefillTask("a", random_prompt(4, PAGE), pages, 0, GREEDY))
    assert all(layer.is_deleted() for layer in old)
    assert [layer.sharding for layer in on.cache.layers] == [on.cache.sharding] * 3
    on.allocator.free(pages)


def test_wires_are_cut_as_chunks_are_run() -> None:
    on, whole = rig("llama3", engine=ONE_KIND), rig("llama3")
    with pytest.raises(ValueError, match="1 layer groups on the wire to decode-0, 3 are computed"):
        on.prefill_engine(**{DESTINATION: whole.wire_to(whole)})

"""Two rigs joined: what a prefill and a decode worker do, without workers."""

import random

from jpd.engine.decode import DecodeEngine
from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillDone, PrefillEngine, PrefillTask
from jpd.request import SamplingParams
from jpd.transfer.destination import Destination
from tests.engine.rig import NUM_SLOTS, Rig

DESTINATION = "decode-0"


class Pair:
    """A prefill rig and a decode rig on other devices, joined by a destination."""

    def __init__(self, source: Rig, target: Rig) -> None:
        self.source, self.target = source, target
        self.wire = source.wire_to(target)
        self.destination = Destination(target.cache.mesh)
        self.pieces = source.pieces
        self.pieces.clear()
        self.prefill = PrefillEngine(
            source.functions,
            source.cache,
            source.leaves,
            self.pieces.append,
            {DESTINATION: self.wire},
        )
        self.decode = DecodeEngine(
            target.functions, target.cache, target.leaves, NUM_SLOTS, [self.wire]
        )
        self.target_pages: dict[str, tuple[int, ...]] = {}
        self.tasks: dict[str, PrefillTask] = {}

    def add(self, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        assert sampling.max_tokens is not None
        self.target_pages[name] = self.target.take(len(prompt) + sampling.max_tokens)
        task = PrefillTask(
            name, prompt, self.source.take(len(prompt)), 0, sampling, destination=DESTINATION
        )
        self.tasks[name] = task
        self.prefill.add(task)

    def pull(self) -> None:
        """Move what was emitted, in any order."""
        random.Random(0).shuffle(self.pieces)
        for piece in self.pieces:
            pages = self.target_pages[piece.attempt_id]
            ids = pages[piece.pages.start : piece.pages.stop]
            arrays = self.destination.put(piece.wire, piece.arrays)
            self.decode.write_pages(arrays, ids, piece.layers)
        self.pieces.clear()

    def row(self, done: PrefillDone) -> DecodeRow:
        """The prefill has ended: its pages are given back before anything is decoded."""
        task = self.tasks[done.attempt_id]
        self.source.allocator.free(task.page_ids)
        pages = self.target_pages[done.attempt_id]
        return DecodeRow(done.attempt_id, pages, done.token_id, task.token_ids, task.sampling)

    def prefill_all(self) -> list[PrefillDone]:
        """Every prompt added, with its pages moved."""
        finished: list[PrefillDone] = []
        while self.prefill.has_work:
            finished += self.prefill.step()
            self.pull()
        return finished

    def decode_all(self, finished: list[PrefillDone]) -> dict[str, list[int]]:
        """All rows together from the first step to the last; slots in the order given."""
        tokens = {done.attempt_id: [done.token_id] for done in finished}
        for done in finished:
            self.decode.insert(self.row(done))
        while self.decode.has_work:
            for step in self.decode.step():
                tokens[step.attempt_id] += step.token_ids
        self._give_back()
        return tokens

    def run(self) -> dict[str, list[int]]:
        """Everything added, to its end; rows join the batch as they become ready."""
        tokens: dict[str, list[int]] = {}
        while self.prefill.has_work or self.decode.has_work:
            finished = self.prefill.step()
            self.pull()
            for done in finished:
                tokens[done.attempt_id] = [done.token_id]
                self.decode.insert(self.row(done))
            for step in self.decode.step():
                tokens[step.attempt_id] += step.token_ids
        self._give_back()
        return tokens

    def _give_back(self) -> None:
        for pages in self.target_pages.values():
            self.target.allocator.free(pages)
        self.target_pages.clear()
        assert self.source.allocator.num_held == self.target.allocator.num_held == 0

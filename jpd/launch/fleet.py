"""Running workers of this process: what the launcher hands over, and how it is closed again."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from jpd.engine.buckets import ShapeBuckets
from jpd.engine.compile_counter import CompileCounter
from jpd.errors import RequestError
from jpd.guidance.compiler import GrammarCompiler
from jpd.transfer.protocol import KVTransfer
from jpd.worker.client import InProcessClient
from jpd.worker.inbox import Call
from jpd.worker.worker import Worker

T = TypeVar("T")
LogitsOf = Callable[[Sequence[int]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Member:
    """One worker, its client and its model's logits, which only its own thread may compute."""

    worker: Worker
    client: InProcessClient
    logits_of: LogitsOf


@dataclass(slots=True)
class Fleet:
    """All workers, ready. Compilations are counted from the moment they were."""

    members: Sequence[Member]
    transfer: KVTransfer
    compile_counter: CompileCounter
    buckets: ShapeBuckets
    max_model_len: int
    grammars: GrammarCompiler | None = None  # None: the model has no tokenizer
    is_closed: bool = False

    @property
    def clients(self) -> tuple[InProcessClient, ...]:
        return tuple(member.client for member in self.members)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [T, V] at every position, from the first worker to prefill. Blocks, compiles."""
        prefills = [member for member in self.members if member.worker.role != "decode"]
        member = (prefills or self.members)[0]

        def compute() -> npt.NDArray[np.float32]:
            with self.compile_counter.expected():
                return member.logits_of(token_ids)

        return on_thread(member.worker, compute)

    def check_integrity(self) -> None:
        """Tables and pools of all workers agree, and nothing is held for nobody. Blocks."""
        for member in self.members:
            on_thread(member.worker, member.worker.check_integrity)

    def learn_destination(self, name: str, like: str) -> None:
        """KV for this new worker of another host travels as that for the other one."""
        for member in self.members:
            learn = partial(member.worker.learn_destination, name, like)
            member.worker.submit(Call(learn, lambda error: None))

    def add_host(self, name: str) -> Sequence[InProcessClient]:
        """All workers of one process are there from its start. Raises RequestError."""
        rule = "hosts are added where they are processes: [launch] kind = subprocess"
        raise RequestError("host", name, rule)

    def forget_worker(self, name: str) -> None:
        """End its thread and let go of its memory. Blocks."""
        gone = [member for member in self.members if member.worker.name == name]
        self.members = [member for member in self.members if member not in gone]
        for member in gone:
            member.worker.close()

    def close(self) -> None:
        """End all threads; what is still running fails with WorkerLostError. Idempotent, blocks."""
        if self.is_closed:
            return
        self.is_closed = True
        for member in self.members:
            member.worker.stop()
        for member in self.members:
            member.worker.close()
        self.transfer.close()
        self.compile_counter.close()
        if self.grammars is not None:
            self.grammars.close()


def on_thread(worker: Worker, action: Callable[[], T]) -> T:
    """Do this on the worker's thread and wait for the result; what it raises is raised here."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # also an assertion: it is the caller's to see
            future.set_exception(error)

    if not worker.submit(Call(run, future.set_exception)):
        raise worker.lost_error()
    return future.result()

"""One small fleet of the explorer: a router, its workers, its clients, and what must hold of them.

    I1  idle: every gauge at its baseline    I3  one terminal event a request, inside its deadline
    I7  no page has two owners, and none is written for another    and: tokens equal the reference

Everything here is chosen by one random generator, so that a seed is a whole story.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from jpd.config import RouterConfig
from jpd.errors import DeadlineError, JpdError, OverloadedError, RequestError
from jpd.explore.paper_engines import VOCAB_SIZE, reference
from jpd.explore.paper_transfer import PaperNetwork
from jpd.explore.paper_worker import PaperWorker, WorkerSizes, draw_sizes
from jpd.metrics import Metrics
from jpd.request import Request, SamplingParams, TokenOutput
from jpd.router.router import Router
from jpd.worker.protocol import Role

LEASE_SECONDS = 1.0
DEADLINE_SLACK_SECONDS = 1e-3
POLL_SECONDS = 2.0
EXCUSES = DeadlineError | OverloadedError | RequestError
"""Too late, too many, too long: nobody but the request itself is at fault."""


@dataclass(slots=True)
class PaperClient:
    """Sends one request and keeps what came of it."""

    request: Request
    outputs: list[TokenOutput] = field(default_factory=list)
    error: BaseException | None = None
    has_asked: bool = False  # one that is cancelled before it could ask has no request
    end_time: float | None = None
    task: "asyncio.Task[None] | None" = None

    @property
    def is_waiting(self) -> bool:
        return self.task is not None and not self.task.done()

    async def run(self, router: Router) -> None:
        self.has_asked = True
        try:
            async with contextlib.aclosing(router.generate(self.request)) as stream:
                async for output in stream:
                    self.outputs.append(output)
        except (JpdError, asyncio.CancelledError) as error:
            self.error = error
        finally:
            self.end_time = asyncio.get_running_loop().time()

    def check(self) -> None:
        """I3 and the tokens, once the request has ended."""
        assert self.end_time is not None, f"{self.request.request_id} never ended"
        late = self.end_time - self.request.deadline
        assert late <= DEADLINE_SLACK_SECONDS, f"{self.request.request_id} ended {late:.3f} s late"
        tokens = [token for output in self.outputs for token in output.token_ids]
        ends = sum(output.finish_reason is not None for output in self.outputs)
        max_tokens = self.request.sampling.max_tokens or 0
        assert ends == (self.error is None), f"{ends} last events, and the error {self.error!r}"
        wanted = reference(self.request.prompt_token_ids, max_tokens)
        assert tokens == wanted[: len(tokens)], f"tokens {tokens}, the reference has {wanted}"
        assert self.error is not None or len(tokens) == max_tokens, f"{len(tokens)} tokens came"


class World:
    """Built inside the running loop whose clock it uses."""

    def __init__(self, draw: random.Random, metrics: Metrics) -> None:
        self.draw, self.metrics = draw, metrics
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        self.network = PaperNetwork(LEASE_SECONDS, self.clock)
        sizes = draw_sizes(draw, page_size=draw.randint(2, 3))
        self.workers = self._make_workers(sizes)
        self.clients: list[PaperClient] = []
        self._ended_before = self._num_ended()
        self.router = Router(
            self.workers,
            RouterConfig(
                local_prefill_tokens=draw.choice((0, 0, 3)),
                send_back=draw.choice(("always", "always", "never")),
                max_waiting=draw.choice((2, 100)),
                transfer_timeout_seconds=sizes.transfer_timeout_seconds,
            ),
            (),
            metrics,
            max_model_len=sizes.max_model_len,
            page_size=sizes.page_size,
            reserve_tokens=sizes.reserve_tokens,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            poll_seconds=POLL_SECONDS,
        )
        # A few prompts that share their beginnings, so that prefixes are found.
        self._stem = [draw.randrange(VOCAB_SIZE) for _ in range(12)]
        for worker in self.workers:
            if worker.role == "decode" and draw.random() < 0.5:  # as after an earlier answer
                worker.remember(self._stem[: draw.randint(2, 8)])

    def _make_workers(self, sizes: WorkerSizes) -> list[PaperWorker]:
        decoders = [f"decode-{n}" for n in range(self.draw.randint(1, 2))]
        prefills = [f"prefill-{n}" for n in range(self.draw.randint(1, 2))]
        roles: dict[str, Role] = dict.fromkeys(prefills, "prefill")
        roles |= dict.fromkeys(decoders, "decode")
        return [
            PaperWorker(
                name,
                role,
                sizes,
                frozenset(decoders if role == "prefill" else prefills),
                self.network,
                self.clock,
            )
            for name, role in roles.items()
        ]

    def arrive(self) -> PaperClient:
        """A new request of a client."""
        draw, now = self.draw, self.clock()
        prompt = self._beginning() + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(0, 3))]
        request = Request(
            request_id=f"r{len(self.clients)}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=draw.randint(1, 4), temperature=0.0, seed=0),
            arrival_time=now,
            deadline=now + draw.choice((0.3, 3.0, 8.0, 8.0)),
            session_id=draw.choice((None, "s")),
            priority=draw.choice((0, 0, 1)),
        )
        client = PaperClient(request)
        client.task = asyncio.get_running_loop().create_task(client.run(self.router))
        self.clients.append(client)
        return client

    def _beginning(self) -> list[int]:
        """Of a prompt: one that many have, or a conversation that goes on."""
        said = [client for client in self.clients if len(client.request.prompt_token_ids) < 9]
        if said and self.draw.random() < 0.4:
            client = self.draw.choice(said)
            tokens = [token for output in client.outputs for token in output.token_ids]
            return [*client.request.prompt_token_ids, *tokens]
        return self._stem[: self.draw.randint(1, 8)]

    def check_end(self, *, is_healthy: bool) -> None:
        """What holds when all is over and everybody had the time to clean up.

        `is_healthy`: nothing was cancelled, lost or broken.
        """
        self.router.check_integrity()
        asked = [client for client in self.clients if client.has_asked]
        for client in asked:
            client.check()
            assert not is_healthy or isinstance(client.error, EXCUSES | None), (
                f"{client.request.request_id} failed though nothing did: {client.error!r}"
            )
        num_ended = self._num_ended() - self._ended_before
        assert num_ended == len(asked), f"{num_ended} terminal events of {len(asked)} requests"
        for worker in self.workers:
            worker.check_at_rest()
        for view in self.router.fleet_views():
            work = (view.num_rows, view.num_reserved_pages, view.num_prefills)
            assert not any(work), f"the router still counts work of {view.name}: {work}"
        assert not self.network.num_kept, f"{self.network.num_kept} pieces are kept for nobody"

    def _num_ended(self) -> int:
        """Terminal events that the router has counted; the other samples are times of creation."""
        samples = (
            sample for family in self.metrics.requests.collect() for sample in family.samples
        )
        return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))

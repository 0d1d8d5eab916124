"""Everything of one server that lives on its event loop: router, text layer, doors.

1. `start` hears from the workers; from then on `generate` and `stream` work.
2. `serve` opens the HTTP and gRPC doors over the same router.
3. `close` shuts the doors, lets running requests end for a while, and ends the rest.

Knows worker clients, no devices. Called by `jpd.api` through its loop thread.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from jpd.config import DeploymentConfig
from jpd.frontend.border import DEFAULT_MAX_CALLS
from jpd.frontend.door_security import DoorSecurity
from jpd.frontend.job import GenerateJob, PreparedJob
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.options import ChatAsk
from jpd.frontend.prompts import ServedModel
from jpd.frontend.server import Endpoints, FrontendServer
from jpd.frontend.service import Generation, TextDelta, TextService
from jpd.frontend.workforce import HostRunner, Workforce
from jpd.guidance.compiler import GrammarCompiler
from jpd.metrics import Metrics
from jpd.router.health import Health
from jpd.router.rates import RateSeed
from jpd.router.router import Router
from jpd.router.trace import TraceLog
from jpd.worker.protocol import WorkerClient

END_SECONDS = 1.0
"""For the doors to tell the clients of requests that were ended."""


class Backend:
    """One router and its faces. Every method runs on the loop that ran `start`."""

    def __init__(
        self,
        clients: Sequence[WorkerClient],
        model: ServedModel,
        deployment: DeploymentConfig,
        metrics: Metrics,
        grammars: GrammarCompiler | None = None,
        hosts: HostRunner | None = None,
        admin_token: str | None = None,
        rate_seeds: Mapping[str, RateSeed] | None = None,
        trace: TraceLog | None = None,
    ) -> None:
        self._metrics = metrics
        self._trace = TraceLog() if trace is None else trace
        self._admin_token = admin_token
        self._hosts_of = {worker.name: worker.host for worker in deployment.workers}
        self._router = Router(
            clients,
            deployment.router,
            deployment.slos,
            metrics,
            max_model_len=model.max_model_len,
            page_size=deployment.cache.page_size,
            reserve_tokens=deployment.cache.reserve_tokens,
            vocab_size=model.vocab_size,
            short_context=model.short_context,
            seeds=rate_seeds,
            trace=self._trace,
        )
        self._workforce = None if hosts is None else Workforce(self._router.roster, hosts)
        timeout_seconds = deployment.router.request_timeout_seconds
        self._service = TextService(
            self._router, model, timeout_seconds, grammars, metrics.count_refusal
        )
        self._doors: list[FrontendServer] = []

    @property
    def model(self) -> ServedModel:
        return self._service.model

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around what is done with a request before `generate` or `stream`. From any thread."""
        with self._service.counting_refusals():
            yield

    async def start(self) -> None:
        """Hear from the workers; the context is what the largest of their pools can hold."""
        await self._router.start()
        context_tokens = self._router.context_tokens
        self._service.model = replace(self._service.model, max_model_len=context_tokens)

    async def generate(
        self, job: GenerateJob | ChatAsk, hear: Callable[[TextDelta], None] | None = None
    ) -> list[Generation]:
        """All choices, whole; `hear` is told each delta.

        Raises RequestError, OverloadedError, DeadlineError, WorkerError.
        """
        return await self._service.collect(await self._prepare(job), hear)

    async def stream(self, job: GenerateJob | ChatAsk) -> AsyncGenerator[TextDelta, None]:
        """Deltas as they come; closing it cancels the request. Raises what `generate` raises."""
        prepared = await self._prepare(job)
        async with aclosing(self._service.stream(prepared)) as deltas:
            async for delta in deltas:
                yield delta

    async def _prepare(self, job: GenerateJob | ChatAsk) -> PreparedJob:
        with self._service.counting_refusals():
            if isinstance(job, ChatAsk):
                offered = () if job.tools is None else job.tools.tools
                prompt = await self._service.chat_prompt(
                    job.messages, job.add_generation_prompt, offered
                )
                job = replace(job.job, prompts=(prompt,))
            return await self._service.prepare(job)

    async def serve(
        self,
        host: str,
        http_port: int | None,
        grpc_port: int | None,
        security: DoorSecurity,
        max_calls: int = DEFAULT_MAX_CALLS,
    ) -> Endpoints:
        """Open doors; may be called again for other ports. Raises OSError."""
        facts = ServerFacts(
            self._report,
            self._metrics.render,
            self._workforce,
            self._admin_token,
            self._trace.requests,
            self._router.activity,
        )
        doors = FrontendServer(self._service, facts, security=security, max_calls=max_calls)
        endpoints = await doors.start(host, http_port, grpc_port)
        self._doors.append(doors)
        return endpoints

    def health(self) -> Health:
        return self._router.health()

    async def check_integrity(self) -> None:
        """When nothing runs. Raises AssertionError."""
        await self._router.settle()
        assert self._router.num_requests == self._router.num_releases == 0
        self._router.check_integrity()

    async def close(self, drain_seconds: float) -> None:
        """Take nothing new, let what runs end in `drain_seconds`, then end it with an error."""
        stops = [
            asyncio.create_task(doors.stop(drain_seconds + END_SECONDS)) for doors in self._doors
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                await self._router.drain()
        await self._router.close()
        await asyncio.gather(*stops)
        self._service.close()

    def _report(self) -> HealthReport:
        health = self._router.health()
        workers = tuple(
            replace(worker, host=worker.host or self._hosts_of.get(worker.name, ""))
            for worker in health.workers
        )
        return HealthReport(health.is_ready, health.status, health.reasons, workers)

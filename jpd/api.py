"""The Python API: a model served by workers in this process, or in those that the mesh file names.

    with jpd.launch(model="gemma-3-270m", mesh="1p1d-cpu") as server:
        for answer in server.generate(["Once upon a time"], max_tokens=32):
            print(answer.text)

Joins launcher, router and doors. The async code runs once, on a background event loop; each method
and its async twin are bridges to it. Called by users and by the command line.
"""

import asyncio
import dataclasses
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Unpack

import numpy as np
import numpy.typing as npt

from jpd.checkpoint.model_source import GenerationConfig, Model, open_model
from jpd.checkpoint.progress import ProgressCallback
from jpd.config import DeploymentConfig
from jpd.frontend.backend import Backend
from jpd.frontend.batch_progress import batch_progress
from jpd.frontend.border import DEFAULT_MAX_CALLS
from jpd.frontend.chat_session import Session
from jpd.frontend.conversation import Conversation
from jpd.frontend.door_security import DoorSecurity
from jpd.frontend.job import GenerateJob
from jpd.frontend.loop_thread import LoopThread
from jpd.frontend.messages import read_messages
from jpd.frontend.options import (
    ChatAsk,
    ChatOptions,
    GenerateOptions,
    PromptLike,
    read_chat_options,
    read_options,
)
from jpd.frontend.served_model import served_model
from jpd.frontend.server import Endpoints
from jpd.frontend.service import Generation, TextDelta
from jpd.frontend.spans import SpanWriter
from jpd.launch.fleet import Fleet
from jpd.launch.inprocess import TransferWrapper
from jpd.launch.launchers import RunningFleet, launch_fleet
from jpd.launch.orders import read_token
from jpd.mesh_file import load_deployment, with_overrides
from jpd.metrics import Metrics
from jpd.nn.config import WeightFormat
from jpd.planner.deployment_plan import plan_deployment
from jpd.planner.roofline import seed_rates
from jpd.router.health import Health
from jpd.router.rates import RateSeed
from jpd.router.trace import TraceLog

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

LOOPBACK = "127.0.0.1"
DRAIN_SECONDS = 5.0
Messages = Sequence[Mapping[str, object]]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def launch(
    model: str | Model,
    mesh: str | Path | DeploymentConfig,
    *,
    chat_template: str | None = None,
    tool_call_parser: str | None = None,
    weights: WeightFormat | None = None,
    generation_config: GenerationConfig = "auto",
    engine: Mapping[str, object] | None = None,
    cache: Mapping[str, object] | None = None,
    router: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
    transfer_wrapper: TransferWrapper | None = None,
    can_prefill_locally: bool = False,
    tracer_provider: "TracerProvider | None" = None,
) -> "Server":
    """A server of `model` on `mesh`, to be used in `with` or `async with`, which start and end it.

    `model` is a card, a Hugging Face or Orbax folder or a .gguf file; `mesh` a mesh file or its
    bare name. `tool_call_parser` names how the model writes calls of functions: hermes, llama3 or
    mistral; None: as its chat template has it. `weights` is "int8" or None, as the card or the
    checkpoint has it. `generation_config` off: what requests leave out has jpd's own defaults, not
    those of the model's generation_config.json. `engine`, `cache` and `router` override keys of
    those tables of the mesh file. `progress` hears how far the weights are. `transfer_wrapper` is
    for tests of faults; `can_prefill_locally` lets `disaggregate=False` work on every decode
    worker. `tracer_provider`, of OpenTelemetry's SDK, gets a span for each request and its phases
    (extra `otel`); it stays the caller's to shut down. Raises ConfigError with every problem found,
    before any weight is read.
    """
    deployment = mesh if isinstance(mesh, DeploymentConfig) else load_deployment(mesh)
    deployment = with_overrides(deployment, {"engine": engine, "cache": cache, "router": router})
    if not isinstance(model, Model):
        model = open_model(
            model,
            chat_template=chat_template,
            weights=weights,
            generation_config=generation_config,
        )
    plan = plan_deployment(model.config, deployment, sizes_memory=False)
    start_fleet = partial(
        launch_fleet,
        model,
        deployment,
        transfer_wrapper=transfer_wrapper,
        progress=progress,
        can_prefill_locally=can_prefill_locally,
    )
    rates = seed_rates(plan)
    return Server(model, deployment, start_fleet, rates, tool_call_parser, tracer_provider)


class Server:
    """A model behind a router. `start` and `close` once each, or `with`; all else in between.

    Methods may be called from any thread, their async twins from any event loop.
    """

    def __init__(
        self,
        model: Model,
        deployment: DeploymentConfig,
        start_fleet: Callable[[], RunningFleet],
        rate_seeds: Mapping[str, RateSeed] | None = None,
        tool_call_parser: str | None = None,
        tracer_provider: "TracerProvider | None" = None,
    ) -> None:
        self.metrics = Metrics()
        self._spans = None if tracer_provider is None else SpanWriter(tracer_provider, model.name)
        self.trace = TraceLog(listen=None if self._spans is None else self._spans.write)
        self._deployment = deployment
        self._start_fleet = start_fleet
        self._rate_seeds = rate_seeds
        self._model = served_model(model, deployment, tool_call_parser)
        self._fleet: RunningFleet | None = None
        self._loop: LoopThread | None = None
        self._backend: Backend | None = None

    def start(self) -> None:
        """Load the weights and compile everything. Blocks; raises ConfigError, WorkerError."""
        if self._fleet is not None:
            raise RuntimeError("the server was started before")
        self._fleet = self._start_fleet()
        self._loop = LoopThread()
        try:
            self._backend = Backend(
                self._fleet.clients,
                self._model,
                self._deployment,
                self.metrics,
                self._fleet.grammars,
                self._fleet,
                read_token(self._deployment.security, self._deployment.file),
                self._rate_seeds,
                self.trace,
            )
            self._loop.run(self._backend.start())
        except BaseException:
            self.close(drain_seconds=0.0)
            raise

    def close(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Let what runs end in `drain_seconds`, end the rest, free the devices. Idempotent."""
        backend, self._backend = self._backend, None
        loop, self._loop = self._loop, None
        try:
            if loop is not None and backend is not None:
                loop.run(backend.close(drain_seconds))
        finally:  # also when a second Ctrl-C comes while this waits
            if loop is not None:
                loop.close()
            if self._fleet is not None:
                self._fleet.close()

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(DRAIN_SECONDS if kind is None else 0.0)

    async def __aenter__(self) -> "Server":
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close, DRAIN_SECONDS if kind is None else 0.0)

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together; known for sure once the server runs."""
        model = self._model if self._backend is None else self._backend.model
        return model.max_model_len

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]:
        """Continue one prompt or several: len(prompts) * n answers, those of one prompt together.

        `progress` shows a bar on stderr. Raises RequestError, which names the field, the value and
        the rule; OverloadedError: no room, with the seconds to wait; DeadlineError; WorkerError: a
        worker was lost and the failure table gave up. Then there is no answer at all.
        """
        job = self._job(prompts, options)
        with batch_progress(job, progress) as hear:
            return self._bridge().run(self._core().generate(job, hear))

    async def agenerate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        progress: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]:
        """The twin of `generate`; cancelling it cancels the requests."""
        job = self._job(prompts, options)
        with batch_progress(job, progress) as hear:
            return await self._bridge().arun(self._core().generate(job, hear))

    def stream(
        self, prompt: PromptLike, **options: Unpack[GenerateOptions]
    ) -> Generator[TextDelta, None, None]:
        """Deltas of one prompt as tokens come. Leaving the iteration cancels the request.

        With n > 1 they are mixed: `TextDelta.index` says whose each is. Wrong arguments raise
        RequestError here; what `generate` raises else comes from the iteration.
        """
        return self._bridge().iterate(self._core().stream(self._job(prompt, options)))

    def astream(
        self, prompt: PromptLike, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[TextDelta, None]:
        """The twin of `stream`."""
        return self._bridge().aiterate(self._core().stream(self._job(prompt, options)))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[Generation]:
        """n answers to a conversation, through the model's chat template.

        `messages` are dicts as OpenAI's API has them, with role and content;
        `Generation.as_message` makes one of an answer. Calls of functions are taken out of its
        text, into `Generation.tool_calls`. Raises what `generate` raises.
        """
        return self._bridge().run(self._core().generate(self._ask(messages, options)))

    async def achat(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[Generation]:
        """The twin of `chat`."""
        return await self._bridge().arun(self._core().generate(self._ask(messages, options)))

    def stream_chat(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Generator[TextDelta, None, None]:
        """What `chat` gives, as it comes. Leaving the iteration cancels the request."""
        return self._bridge().iterate(self._core().stream(self._ask(messages, options)))

    def astream_chat(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[TextDelta, None]:
        """The twin of `stream_chat`."""
        return self._bridge().aiterate(self._core().stream(self._ask(messages, options)))

    def session(self, session_id: str | None = None, messages: Messages = ()) -> Session:
        """A chat that remembers its turns, after `messages` that were said before.

        Without a `session_id` one is made up. Raises RequestError for messages that are none.
        """
        earlier = read_messages(messages) if messages else ()
        conversation = Conversation(session_id, earlier)
        return Session(self._bridge(), self._core(), self._ask, conversation)

    def serve(
        self,
        http_port: int | None = 0,
        grpc_port: int | None = 0,
        host: str = LOOPBACK,
        *,
        api_key: str | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        max_calls: int = DEFAULT_MAX_CALLS,
    ) -> Endpoints:
        """Open the HTTP and gRPC doors; port 0 is a free one, None leaves that door shut.

        With `api_key` callers must send it as a Bearer token; `tls_cert` and `tls_key` are PEM
        files; at each door at most `max_calls` calls are under way. Returns where the doors are.
        Raises ConfigError, and OSError when a port cannot be had.
        """
        files = [None if name is None else Path(name) for name in (tls_cert, tls_key)]
        security = DoorSecurity(api_key, *files)
        opening = self._core().serve(host, http_port, grpc_port, security, max_calls)
        return self._bridge().run(opening)

    def wait_for_signal(self, when_armed: Callable[[], None] | None = None) -> signal.Signals:
        """Block until SIGINT or SIGTERM comes, and return it. On the main thread only.

        `when_armed` is called when no signal can be missed any more: the time to say "ready".
        """
        arrived = threading.Event()
        received = list[signal.Signals]()

        def note(number: int, frame: FrameType | None) -> None:
            received.append(signal.Signals(number))
            arrived.set()

        previous = {number: signal.signal(number, note) for number in SIGNALS}
        try:
            if when_armed is not None:
                when_armed()
            arrived.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return received[0]

    def health(self) -> Health:
        """The verdict of this moment, with reasons and a line for each worker."""

        async def look() -> Health:
            return self._core().health()

        return self._bridge().run(look())

    def check_integrity(self) -> None:
        """When nothing runs: records and pages must agree, or AssertionError is raised.

        Hosts in processes of their own recount their pages when idle, and the health tells.
        """
        self._bridge().run(self._core().check_integrity())
        if isinstance(self._fleet, Fleet):
            self._fleet.check_integrity()

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """float32 [T, V]: what the model gives at every position of one prompt. For `verify`."""
        if self._fleet is None:
            raise RuntimeError("the server is not running")
        return self._fleet.logits(token_ids)

    def _job(
        self, prompts: PromptLike | Sequence[PromptLike], options: GenerateOptions
    ) -> GenerateJob:
        with self._core().counting_refusals():
            job = read_options(prompts, options, self._model.default_sampling)
        return dataclasses.replace(job, trace_context=self._trace_context())

    def _ask(self, messages: Messages, options: ChatOptions) -> ChatAsk:
        with self._core().counting_refusals():
            ask = read_chat_options(messages, options, self._model)
        job = dataclasses.replace(ask.job, trace_context=self._trace_context())
        return dataclasses.replace(ask, job=job)

    def _trace_context(self) -> Mapping[str, str]:
        return {} if self._spans is None else self._spans.current_context()

    def _bridge(self) -> LoopThread:
        if self._loop is None:
            raise RuntimeError("the server is not running: use it in `with`, or call start()")
        return self._loop

    def _core(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the server is not running: use it in `with`, or call start()")
        return self._backend

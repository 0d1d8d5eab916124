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
from typing import Unpack

import numpy as np
import numpy.typing as npt

from jpd.checkpoint.model_source import Model, open_model
from jpd.checkpoint.progress import ProgressCallback
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.frontend.backend import Backend
from jpd.frontend.border import DEFAULT_MAX_CALLS
from jpd.frontend.door_security import DoorSecurity
from jpd.frontend.job import GenerateJob
from jpd.frontend.loop_thread import LoopThread
from jpd.frontend.options import GenerateOptions, PromptLike, read_options
from jpd.frontend.prompts import ServedModel
from jpd.frontend.server import Endpoints
from jpd.frontend.service import Generation, TextDelta
from jpd.frontend.tool_formats import FORMATS, ToolFormat, format_of_template
from jpd.launch.inprocess import TransferWrapper
from jpd.launch.launchers import RunningFleet, launch_fleet
from jpd.launch.orders import read_token
from jpd.mesh_file import load_deployment, resolve_platform
from jpd.metrics import Metrics
from jpd.nn.config import WeightFormat
from jpd.planner.deployment_plan import plan_deployment
from jpd.planner.roofline import seed_rates
from jpd.router.health import Health
from jpd.router.rates import RateSeed
from jpd.router.trace import TraceLog

LOOPBACK = "127.0.0.1"
DRAIN_SECONDS = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def launch(
    model: str | Model,
    mesh: str | Path | DeploymentConfig,
    *,
    chat_template: str | None = None,
    tool_call_parser: str | None = None,
    weights: WeightFormat | None = None,
    engine: Mapping[str, object] | None = None,
    cache: Mapping[str, object] | None = None,
    router: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
    transfer_wrapper: TransferWrapper | None = None,
    can_prefill_locally: bool = False,
) -> "Server":
    """A server of `model` on `mesh`, to be used in `with` or `async with`, which start and end it.

    `model` is a card, a Hugging Face or Orbax folder or a .gguf file; `mesh` a mesh file or its
    bare name. `tool_call_parser` names how the model writes calls of functions: hermes, llama3 or
    mistral; None: as its chat template has it. `weights` is "int8" or None, as the card or the
    checkpoint has it. `engine`, `cache` and `router` override keys of those tables of the mesh
    file. `progress` hears how far the weights are. `transfer_wrapper` is for tests of faults;
    `can_prefill_locally` lets `disaggregate=False` work on every decode worker. Raises ConfigError
    with every problem found, before any weight is read.
    """
    deployment = mesh if isinstance(mesh, DeploymentConfig) else load_deployment(mesh)
    deployment = _override(deployment, {"engine": engine, "cache": cache, "router": router})
    if not isinstance(model, Model):
        model = open_model(model, chat_template=chat_template, weights=weights)
    plan = plan_deployment(model.config, deployment, sizes_memory=False)
    start_fleet = partial(
        launch_fleet,
        model,
        deployment,
        transfer_wrapper=transfer_wrapper,
        progress=progress,
        can_prefill_locally=can_prefill_locally,
    )
    return Server(model, deployment, start_fleet, seed_rates(plan), tool_call_parser)


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
    ) -> None:
        self.metrics = Metrics()
        self.trace = TraceLog()
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
        self, prompts: PromptLike | Sequence[PromptLike], **options: Unpack[GenerateOptions]
    ) -> list[Generation]:
        """Continue one prompt or several; the answers in order, those of one prompt together.

        Raises RequestError, OverloadedError, DeadlineError or WorkerError; then there is no answer.
        """
        return self._bridge().run(self._core().generate(self._job(prompts, options)))

    async def agenerate(
        self, prompts: PromptLike | Sequence[PromptLike], **options: Unpack[GenerateOptions]
    ) -> list[Generation]:
        """The twin of `generate`; cancelling it cancels the requests."""
        return await self._bridge().arun(self._core().generate(self._job(prompts, options)))

    def stream(
        self, prompt: PromptLike, **options: Unpack[GenerateOptions]
    ) -> Generator[TextDelta, None, None]:
        """Deltas of one prompt as tokens come. Leaving the iteration cancels the request.

        Wrong arguments raise RequestError here, the rest with the first delta.
        """
        return self._bridge().iterate(self._core().stream(self._job(prompt, options)))

    def astream(
        self, prompt: PromptLike, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[TextDelta, None]:
        """The twin of `stream`."""
        return self._bridge().aiterate(self._core().stream(self._job(prompt, options)))

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

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """float32 [T, V]: what the model gives at every position of one prompt. For `verify`."""
        if self._fleet is None:
            raise RuntimeError("the server is not running")
        return self._fleet.logits(token_ids)

    def _job(
        self, prompts: PromptLike | Sequence[PromptLike], options: GenerateOptions
    ) -> GenerateJob:
        with self._core().counting_refusals():
            return read_options(prompts, options, self._model.default_sampling)

    def _bridge(self) -> LoopThread:
        if self._loop is None:
            raise RuntimeError("the server is not running: use it in `with`, or call start()")
        return self._loop

    def _core(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the server is not running: use it in `with`, or call start()")
        return self._backend


def served_model(
    model: Model, deployment: DeploymentConfig, tool_call_parser: str | None = None
) -> ServedModel:
    """What the doors know of the model, with the recommendations of its authors as defaults."""
    recommended = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p")
        if (value := getattr(model.generation, name)) is not None
    }
    return ServedModel(
        name=model.name,
        tokenizer=model.tokenizer,
        vocab_size=model.config.vocab_size,
        max_model_len=deployment.engine.served_len(model.config.max_len),
        short_context=model.config.short_context,
        eos_token_ids=model.eos_token_ids,
        default_sampling=recommended,
        tool_format=_tool_format(model, tool_call_parser),
    )


def _tool_format(model: Model, name: str | None) -> ToolFormat | None:
    """By its name, or else as the chat template has it. Raises ConfigError."""
    if name is None and model.tokenizer is not None:
        name = format_of_template(model.tokenizer.tool_template)
    if name is not None and name not in FORMATS:
        rule = f"must be one of {', '.join(FORMATS)}"
        raise ConfigError([Problem("launch()", "tool_call_parser", name, rule)])
    return None if name is None else FORMATS[name]


def _override(
    deployment: DeploymentConfig, tables: Mapping[str, Mapping[str, object] | None]
) -> DeploymentConfig:
    """The deployment with keys of its tables replaced. Raises ConfigError for unknown keys."""
    problems = []
    changed: dict[str, object] = {}
    for name, values in tables.items():
        table = getattr(deployment, name)
        known = {field.name for field in dataclasses.fields(table)}
        for key, value in (values or {}).items():
            if key not in known:
                rule = f"is not a key of [{name}]"
                problems.append(Problem("launch()", f"{name}.{key}", value, rule))
        if values and not problems:
            changed[name] = dataclasses.replace(table, **values)
    if problems:
        raise ConfigError(problems)
    return resolve_platform(dataclasses.replace(deployment, **changed)) if changed else deployment  # type: ignore[arg-type]

"""Both doors over a fake router, on real ports, in a background thread."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import httpx
import pytest

from jpd.frontend.door_security import NO_SECURITY, DoorSecurity
from jpd.frontend.loop_thread import LoopThread
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.prompts import ServedModel
from jpd.frontend.server import Endpoints, FrontendServer
from jpd.frontend.service import TextService
from jpd.guidance.compiler import GrammarCompiler
from jpd.request import Request
from tests.frontend.fake_router import FakeRouter, FakeStream, make_model, make_tokenizer


@dataclass
class Doors:
    """A running FrontendServer; `router` can be replaced between requests."""

    loop: LoopThread
    router: FakeRouter = field(default_factory=FakeRouter)
    health: HealthReport = HealthReport(True, "ok")
    num_refusals: int = 0
    endpoints: Endpoints = Endpoints("127.0.0.1", None, None)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(verify=False, timeout=10))

    def count_refusal(self) -> None:
        self.num_refusals += 1

    def generate(self, request: Request) -> FakeStream:
        return self.router.generate(request)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.endpoints.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.endpoints.grpc_port}"


Opened = Callable[..., Doors]
"""Of a ServedModel, and a DoorSecurity where callers need a key."""


@pytest.fixture(scope="module")
def open_doors() -> Generator[Opened, None, None]:
    """Opens doors for a model; all are closed after the module."""
    loop = LoopThread()
    closers: list[Callable[[], None]] = []

    def open_for(model: ServedModel, security: DoorSecurity = NO_SECURITY, **limits: int) -> Doors:
        doors = Doors(loop)
        grammars = None
        if model.tokenizer is not None:
            grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
            closers.append(grammars.close)
        service = TextService(doors, model, grammars=grammars, count_refusal=doors.count_refusal)
        facts = ServerFacts(lambda: doors.health, lambda: b"jpd:up 1\n")
        server = FrontendServer(service, facts, max_body_bytes=1 << 20, security=security, **limits)
        doors.endpoints = loop.run(server.start("127.0.0.1", 0, 0))
        doors.http.base_url = doors.url
        closers.append(doors.http.close)
        closers.append(lambda: loop.run(server.stop(0.2)))
        closers.append(service.close)
        return doors

    yield open_for
    for close in closers:
        close()
    loop.close()


@pytest.fixture(scope="module")
def module_doors(open_doors: Opened) -> Doors:
    return open_doors(make_model(make_tokenizer()))


@pytest.fixture
def doors(module_doors: Doors) -> Doors:
    """The doors with a fresh router behind them."""
    module_doors.router = FakeRouter()
    module_doors.health = HealthReport(True, "ok")
    return module_doors

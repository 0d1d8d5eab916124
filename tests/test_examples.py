"""The examples run, against a server without devices."""

import asyncio
import importlib.util
import math
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import openai
import pytest

from jpd.api import Server
from tests.support.fake_server import FakeFleet, make_tiny_model, write_deployment


@pytest.fixture(scope="module")
def server(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server, None, None]:
    deployment = write_deployment(tmp_path_factory.mktemp("mesh"))
    with Server(make_tiny_model(repo), deployment, FakeFleet) as server:
        yield server


def example(repo: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, repo / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(last: str, num_tokens: int) -> str:
    """What the fake workers say after a letter."""
    return "".join(chr(ord(last) + step) for step in range(1, num_tokens + 1))


def test_python_api(repo: Path, server: Server) -> None:
    module = example(repo, "python_api")
    assert module.batch(server)[1] == counted("s", 16)[:12] + "\ufffd" * 4
    assert module.stream(server).startswith("fghij")
    assert asyncio.run(module.concurrent_streams(server))[0].startswith("fghij")


def test_chat_session(repo: Path, server: Server) -> None:
    module = example(repo, "chat_session")
    assert module.talk(server) == [counted(">", 8)] * 2
    assert asyncio.run(module.talk_to_many(server, ["Ann", "Bob"])) == [counted(">", 8)] * 2


def test_logprobs(repo: Path, server: Server) -> None:
    module = example(repo, "logprobs")
    assert [token_id for token_id, _ in module.alternatives(server, "a")] == [*b"bcdefghi"]
    assert math.log(module.perplexity(server, "ab")) == pytest.approx((97 + 98) / 2)


def test_openai_client(repo: Path, server: Server) -> None:
    module = example(repo, "openai_client")
    url = f"http://127.0.0.1:{server.serve(grpc_port=None).http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert module.chat(client, "tiny").startswith("?@ABC")
        assert module.phases(client, "tiny")["path"] == ["disaggregated"]


def test_grpc_client(repo: Path, server: Server) -> None:
    module = example(repo, "grpc_client")
    port = server.serve(http_port=None).grpc_port
    assert module.generate(f"127.0.0.1:{port}").startswith("fghij")


def test_grpc_chat(repo: Path, server: Server) -> None:
    module = example(repo, "grpc_chat")
    address = f"127.0.0.1:{server.serve(http_port=None).grpc_port}"
    answers = asyncio.run(module.chat(address, ["hi", "x" * 5000, "hello"]))
    assert answers[0] == answers[2] == counted(">", 16)
    assert "must leave room for output" in answers[1]

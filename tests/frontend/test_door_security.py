"""The API key and TLS at both doors, with the official clients."""

import asyncio
import logging
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jpd.errors import ConfigError
from jpd.frontend.door_security import DoorSecurity, UnauthorizedError
from jpd.frontend.loop_thread import LoopThread
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.server import Endpoints, FrontendServer
from jpd.frontend.service import TextService
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.fake_router import FakeRouter, make_model, make_tokenizer

KEY = "sk-secret"
OPEN = ("/", "/page/page.js", "/health", "/docs", "/openapi.json")
GUARDED = ("/metrics", "/version", "/v1/models", "/nowhere", "/docs/x", "//health", "/activity")

Opener = Callable[[DoorSecurity], Endpoints]


@pytest.fixture(scope="module")
def open_with() -> Iterator[Opener]:
    loop = LoopThread()
    service = TextService(FakeRouter(), make_model(make_tokenizer()))
    servers = list[FrontendServer]()

    def open_doors(security: DoorSecurity) -> Endpoints:
        facts = ServerFacts(lambda: HealthReport(True, "ok"), lambda: b"jpd:up 1\n")
        servers.append(FrontendServer(service, facts, security=security))
        return loop.run(servers[-1].start("127.0.0.1", 0, 0))

    yield open_doors
    for server in servers:
        loop.run(server.stop(0.2))
    service.close()
    loop.close()


@pytest.fixture(scope="module")
def doors(open_with: Opener) -> Endpoints:
    return open_with(DoorSecurity(KEY))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that vouches for itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 "
        f"-keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
    return certificate, key


def test_the_official_client_with_and_without_the_key(doors: Endpoints) -> None:
    url = f"http://127.0.0.1:{doors.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt="hi").choices[0].text == "hi"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="tiny", prompt="hi")
    assert caught.value.code == "invalid_api_key" and KEY not in str(caught.value)
    assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_what_is_open_without_a_key(doors: Endpoints) -> None:
    url = f"http://127.0.0.1:{doors.http_port}"
    with httpx.Client() as http:
        assert [http.get(url + path).status_code for path in OPEN] == [200] * len(OPEN)
        assert [http.get(url + path).status_code for path in GUARDED] == [401] * len(GUARDED)
        known = {"authorization": f"bearer {KEY}"}
        assert http.get(f"{url}/metrics", headers=known).status_code == 200
        page = http.get(f"{url}/openapi.json").json()
    assert page["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert page["paths"]["/v1/completions"]["post"]["security"] == [{"HTTPBearer": []}]


@pytest.mark.parametrize(
    "shown",
    [b"", b"Bearer", b"Bearer ", b"Basic sk-secret", b"sk-secret", b"Bearer sk-secre", b"\xff"],
)
def test_what_is_not_the_key(shown: bytes) -> None:
    security = DoorSecurity(KEY)
    with pytest.raises(UnauthorizedError):
        security.check_path("/v1/models", shown)
    security.check_path("/v1/models", b"Bearer sk-secret")
    DoorSecurity().check_path("/v1/models", shown)
    assert KEY not in repr(security)


def test_grpc_asks_for_the_key_too(doors: Endpoints) -> None:
    request = jpd_pb2.GenerateRequest(text="hi")
    with grpc.insecure_channel(f"127.0.0.1:{doors.grpc_port}") as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        for metadata in ((), (("authorization", "Bearer other"),)):
            for call in (
                lambda: list(stub.Generate(request, metadata=metadata)),  # noqa: B023
                lambda: stub.GetModelInfo(jpd_pb2.GetModelInfoRequest(), metadata=metadata),  # noqa: B023
                lambda: list(stub.Chat(iter(()), metadata=metadata, timeout=5)),  # noqa: B023
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        known = (("authorization", f"Bearer {KEY}"),)
        assert "".join(part.text for part in stub.Generate(request, metadata=known)) == "hi"
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_tls_at_both_doors(open_with: Opener, files: tuple[Path, Path]) -> None:
    certificate, key = files
    doors = open_with(DoorSecurity(KEY, certificate, key))
    assert doors.has_tls
    http = httpx.Client(verify=ssl.create_default_context(cafile=certificate))
    url = f"https://127.0.0.1:{doors.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http) as client:
        stream = client.completions.create(model="tiny", prompt="hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "hi"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{doors.http_port}/health")
    trust = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{doors.grpc_port}", trust) as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        known = (("authorization", f"Bearer {KEY}"),)
        parts = stub.Generate(jpd_pb2.GenerateRequest(text="hi"), metadata=known)
        assert "".join(part.text for part in parts) == "hi"


def test_what_cannot_be_used_is_told_at_once(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = files
    for wrong in (
        lambda: DoorSecurity(""),
        lambda: DoorSecurity("two words"),
        lambda: DoorSecurity("schlüssel"),
        lambda: DoorSecurity(tls_cert=certificate),
        lambda: DoorSecurity(tls_cert=key, tls_key=certificate),
        lambda: DoorSecurity(tls_cert=certificate, tls_key=tmp_path / "none"),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_an_encrypted_key_asks_nobody(files: tuple[Path, Path], tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    command = f"openssl pkcs8 -topk8 -in {files[1]} -passout pass:word -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
    with pytest.raises(ConfigError, match="not encrypted"):
        DoorSecurity(tls_cert=files[0], tls_key=locked)


def test_unsafe_addresses_are_warned_about(
    caplog: pytest.LogCaptureFixture, files: tuple[Path, Path]
) -> None:
    assert "API key" in str(DoorSecurity().warning(is_loopback=False))
    assert "unencrypted" in str(DoorSecurity(KEY).warning(is_loopback=False))
    assert DoorSecurity(KEY, *files).warning(is_loopback=False) is None
    assert DoorSecurity().warning(is_loopback=True) is None

    async def start() -> None:
        service = TextService(FakeRouter(), make_model(None))
        server = FrontendServer(service, ServerFacts(lambda: HealthReport(True, "ok"), bytes))
        await server.start("0.0.0.0", 0, None)
        await server.stop(0.0)
        service.close()

    with caplog.at_level(logging.WARNING, "jpd.frontend"):
        asyncio.run(start())
    assert "0.0.0.0: other machines can reach" in caplog.text

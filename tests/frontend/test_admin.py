"""Operators at the HTTP door: who may, what they see, and what is refused. With `jpd workers`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from jpd.cli import main
from jpd.config import RouterConfig
from jpd.errors import ConfigError, Problem
from jpd.frontend.http_app import create_app
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.server import FrontendServer
from jpd.frontend.workforce import Workforce
from jpd.metrics import Metrics
from jpd.router.router import Router
from jpd.worker.protocol import WorkerClient
from tests.support.fake_worker import FakeWorker


@dataclass
class FakeHosts:
    added: list[FakeWorker] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def add_host(self, name: str) -> Sequence[WorkerClient]:
        if name != "node-b":
            raise ConfigError([Problem("f.toml", "host", name, "is not there")])
        return [FakeWorker("decode-1", "decode")]

    def forget_worker(self, name: str) -> None:
        self.forgotten.append(name)


@contextlib.asynccontextmanager
async def operators(token: str | None = None) -> AsyncIterator[tuple[ServerFacts, FakeHosts]]:
    router = Router(
        [FakeWorker("prefill-0", "prefill"), FakeWorker("decode-0", "decode")],
        RouterConfig(),
        (),
        Metrics(),
        max_model_len=64,
        page_size=16,
    )
    await router.start()
    hosts = FakeHosts()
    workforce = Workforce(router.roster, hosts)
    try:
        yield ServerFacts(lambda: HealthReport(True, "ok"), bytes, workforce, token), hosts
    finally:
        await router.close()


def app_of(facts: ServerFacts) -> FastAPI:
    return create_app(None, facts)  # type: ignore[arg-type]  # no generation here


def caller(facts: ServerFacts, address: str = "127.0.0.1", **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_of(facts), client=(address, 1234))
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.AsyncClient(transport=transport, base_url="http://jpd", headers=shown)


async def test_only_this_machine_or_the_token_may_ask() -> None:
    async with operators(token="secret") as (facts, _):
        for who, status in (
            (caller(facts), 200),
            (caller(facts, "::1"), 200),
            (caller(facts, "10.0.0.7"), 403),
            (caller(facts, "10.0.0.7", authorization="Bearer wrong"), 403),
            (caller(facts, "10.0.0.7", authorization="Bearer secret"), 200),
            (caller(facts, x_forwarded_for="10.0.0.7"), 403),
        ):
            async with who as http:
                answer = await http.get("/admin/workers")
                assert answer.status_code == status, answer.text
                if status == 403:
                    assert answer.json()["error"]["code"] == "forbidden"


async def test_without_a_token_nobody_has_it() -> None:
    async with operators() as (facts, _):
        for shown in ("Bearer ", "Bearer None", ""):
            async with caller(facts, "10.0.0.7", authorization=shown) as http:
                assert (await http.get("/admin/workers")).status_code == 403


async def test_workers_are_listed_added_changed_and_removed() -> None:
    async with operators() as (facts, hosts), caller(facts) as http:
        (prefill, decode) = (await http.get("/admin/workers")).json()["workers"]
        assert (prefill["name"], prefill["role"], prefill["state"]) == (
            "prefill-0",
            "prefill",
            "up",
        )
        assert (decode["num_rows"], decode["num_slots"]) == (0, 4)
        answer = await http.post("/admin/hosts/node-b")
        assert [line["name"] for line in answer.json()["workers"]][-1] == "decode-1"
        answer = await http.post("/admin/workers/decode-0/role", json={"role": "prefill"})
        assert answer.status_code == 200 and answer.json()["workers"][1]["role"] == "prefill"
        answer = await http.delete("/admin/workers/decode-0")
        assert [line["name"] for line in answer.json()["workers"]] == ["prefill-0", "decode-1"]
        assert hosts.forgotten == ["decode-0"]


async def test_what_cannot_be_is_400_with_the_reason() -> None:
    async with operators() as (facts, _), caller(facts) as http:
        for answer, reason in (
            (await http.post("/admin/workers/decode-0/drain"), "nobody else could decode"),
            (await http.post("/admin/workers/nobody/drain"), "no such worker"),
            (await http.post("/admin/hosts/node-c"), "f.toml: host = 'node-c': is not there"),
            (
                await http.post("/admin/workers/decode-0/role", json={"role": "king"}),
                "must be one of prefill, decode, colocated",
            ),
            (await http.post("/admin/workers/decode-0/role", json={}), "role"),
        ):
            assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


async def test_the_command_says_what_the_server_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with operators() as (facts, _):
        server = FrontendServer(None, facts)  # type: ignore[arg-type]
        doors = await server.start("127.0.0.1", 0, None)

        async def jpd(*arguments: str) -> int:
            url = f"http://127.0.0.1:{doors.http_port}"
            return await asyncio.to_thread(main, ["workers", "--url", url, *arguments])

        try:
            assert await jpd("list") == 0
            assert "decode-0" in capsys.readouterr().out
            assert await jpd("drain", "decode-0") == 2
            assert "nobody else could decode" in capsys.readouterr().err
            assert await jpd("add", "node-b") == 0
            assert await jpd("drain", "decode-0") == 0
            assert "draining" in capsys.readouterr().out
            assert await jpd("set-role", "decode-0", "prefill") == 0
            assert await jpd("remove", "decode-0") == 0
            assert "decode-0" not in capsys.readouterr().out.rpartition("remove")[2][-400:]
        finally:
            await server.stop(0.0)
        assert await jpd("list") == 2
        assert "--url" in capsys.readouterr().err
        assert await jpd("--token-file", str(tmp_path / "none"), "list") == 2

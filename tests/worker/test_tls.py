"""Hosts behind TLS and a token: who has both is served, everybody else is told why not."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jpd.errors import WorkerLostError
from jpd.launch.orders import read_security, read_token
from jpd.rpc.security import Security
from jpd.worker.connection import HostConnection
from jpd.worker.remote import RemoteClient
from tests.support.host_certificates import make_certificates
from tests.worker.fleet import attempt_of, fleet
from tests.worker.paper import reference
from tests.worker.test_remote import FINGERPRINT, FakePlace, Remote, start_server


@pytest.fixture(scope="module")
def ours(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Security:
    config = make_certificates(repo, tmp_path_factory.mktemp("ours"))
    return read_security(config, "f.toml", read_token(config, "f.toml") or "")


@pytest.fixture(scope="module")
def theirs(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Security:
    config = make_certificates(repo, tmp_path_factory.mktemp("theirs"))
    return read_security(config, "f.toml", read_token(config, "f.toml") or "")


async def reason_for(place: FakePlace, security: Security) -> str:
    """Why a router with this does not get to the host."""
    connection = HostConnection(place, FINGERPRINT, security)
    try:
        await asyncio.wait_for(connection.start(), 10)
        with pytest.raises(WorkerLostError) as lost:
            await RemoteClient("decode-0", "decode", connection).status()
        return str(lost.value)
    finally:
        await connection.stop()


async def test_who_has_certificate_and_token_is_served_and_others_are_told_why_not(
    ours: Security, theirs: Security
) -> None:
    assert len(ours.token) == 64 and ours.certificates and theirs.certificates
    stranger = replace(ours.certificates, authority=theirs.certificates.authority)
    impostor = replace(theirs.certificates, authority=ours.certificates.authority)
    refused = {
        "unauthenticated: the token is missing or another one": [
            replace(ours, token=""),
            replace(ours, token=theirs.token),
        ],
        r"its certificate was not issued by \[security\] ca_file": [
            replace(ours, certificates=stranger)
        ],
        "certificate_file may not be of its ca_file": [replace(ours, certificates=impostor)],
        r"it may want TLS, and \[security\] has no certificates": [
            replace(ours, certificates=None)
        ],
    }
    async with fleet() as running:
        server, place = await start_server(running, ours)
        for reason, callers in refused.items():
            for security in callers:
                assert re.search(reason, await reason_for(place, security))
        connection = HostConnection(place, FINGERPRINT, ours)
        await connection.start()
        attempt = attempt_of(range(20), 5)
        assert await Remote(running, server, place, connection).run(attempt) == reference(attempt)
        await connection.stop()
        await server.stop(0.0)
        server, place = await start_server(running, replace(ours, certificates=None))
        assert "it speaks no TLS" in await reason_for(place, ours)
        await server.stop(0.0)

"""The page's files, who may have them, and the stream it draws. A browser is in tests/e2e."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jpd.frontend.door_security import DoorSecurity
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.page_routes import MAX_ENDED
from jpd.frontend.server import FrontendServer
from jpd.frontend.service import TextService
from jpd.request import RequestState
from jpd.router.activity import Activity, WorkerActivity
from jpd.router.record import PhaseSpan
from jpd.router.trace import RequestTrace
from tests.frontend.conftest import Doors
from tests.frontend.fake_router import make_model, make_tokenizer

KEY = "a-key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}


def ended(number: int) -> RequestTrace:
    span = PhaseSpan("decode", "decode-0", number - 1.0, number)
    return RequestTrace(f"r{number}", RequestState.FINISHED, 7, 3, (span,), number, 0.5, 0.25)


class Watched:
    """What the router would show: requests that end one by one, until it drains."""

    def __init__(self) -> None:
        self.log = [ended(number) for number in range(1, 1000)]
        self.is_draining = False
        self.sinces = list[float]()

    def look(self, since: float) -> Activity:
        self.sinces.append(since)
        worker = WorkerActivity("decode-0", "decode", 0, 1, 4, 32, 5, 2)
        late = tuple(trace for trace in self.log if trace.end > since)
        return Activity(200.0, self.is_draining, 2, (worker,), (), late)


@pytest.fixture
def watched(doors: Doors) -> Iterator[tuple[Watched, httpx.Client]]:
    """Doors that ask for a key, over a scripted fleet."""
    watched = Watched()
    facts = ServerFacts(lambda: HealthReport(True, "ok"), lambda: b"", look=watched.look)
    service = TextService(doors, make_model(make_tokenizer()))
    server = FrontendServer(service, facts, security=DoorSecurity(KEY))
    port = doors.loop.run(server.start("127.0.0.1", 0, None)).http_port
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        yield watched, client
    doors.loop.run(server.stop(0.2))
    service.close()


def test_the_page_and_all_it_asks_for_come_from_here_without_the_key(
    watched: tuple[Watched, httpx.Client],
) -> None:
    _, client = watched
    to_read, texts = ["/"], dict[str, str]()
    while to_read:
        path = to_read.pop()
        reply = client.get(path)
        assert reply.status_code == 200, path
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        texts[path] = reply.text
        asked = re.findall(r'(?:href|src)="(/page/[^"]+)"', reply.text)
        asked += [f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', reply.text)]
        to_read += [name for name in asked if name not in texts]
    assert {"/page/page.js", "/page/lanes.js", "/page/page.css", "/page/icon.svg"} <= set(texts)
    code = "".join(texts.values()).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval", code)


@pytest.mark.parametrize(
    "name", ["/page/../api.py", "/page/..%2fapi.py", "/page/%2e%2e/x", "/page/", "/page/nothing.js"]
)
def test_nothing_else_is_served(watched: tuple[Watched, httpx.Client], name: str) -> None:
    reply = watched[1].get(name, headers=WITH_KEY)
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "no_route"


def test_activity_needs_the_key_and_tells_what_is_new(
    watched: tuple[Watched, httpx.Client],
) -> None:
    fleet, client = watched
    assert client.get("/activity").status_code == 401
    bodies: list[Any] = []
    with client.stream("GET", "/activity", headers=WITH_KEY) as reply:
        for line in reply.iter_lines():
            if not line:
                continue
            body = json.loads(line.removeprefix("data: "))
            if not body["ended"]:
                continue  # a look between two ends
            bodies.append(body)
            fleet.log.append(ended(999 + len(bodies)))
            fleet.is_draining = len(bodies) == 2  # the stream ends with the next look
    first, second, third = bodies
    assert [len(body["ended"]) for body in bodies] == [MAX_ENDED, 1, 1]
    assert first["ended"][-1]["id"] == "r999" and second["ended"][0]["id"] == "r1000"
    assert third["ended"][0] == {
        "id": "r1001",
        "state": "finished",
        "prompt_tokens": 7,
        "output_tokens": 3,
        "end": 1001,
        "ttft": 0.5,
        "tpot": 0.25,
        "spans": [["decode", "decode-0", 1000.0, 1001]],
    }
    assert first["workers"][0]["pages_used"] == 5 and first["waiting"] == 2
    assert first["model"]["chats"] and first["health"] == {"status": "ok", "reasons": []}


def test_a_watcher_that_leaves_is_not_looked_after(
    watched: tuple[Watched, httpx.Client],
) -> None:
    fleet, client = watched
    with contextlib.suppress(httpx.HTTPError):
        with client.stream("GET", "/activity", headers=WITH_KEY) as reply:
            next(reply.iter_lines())
    num_looks = len(fleet.sinces)
    with client.stream("GET", "/activity", headers=WITH_KEY) as reply:
        lines = reply.iter_lines()
        for _ in range(4):  # two looks, a period apart
            next(lines)
    assert len(fleet.sinces) <= num_looks + 4  # what looks of its own takes, and one on the way

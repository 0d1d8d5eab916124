"""The page in a real browser, over a tiny model that is served for real."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from jpd.api import Server, launch
from jpd.request import RequestState
from tests.e2e.conftest import TINY_MESH
from tests.support.tiny_tokenizer import copy_with_tokenizer

KEY = "a-key"
CONTEXT = 2048
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
PROGRAMS = ("chromium", "chromedriver")

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)),
    reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)",
)


@pytest.fixture(scope="module")
def server(golden_llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A chat model whose context is long enough that a prompt takes a while."""
    folder = tmp_path_factory.mktemp("page")
    model = copy_with_tokenizer(golden_llama3, folder / "tiny")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    text = TINY_MESH.format(
        num_devices=2, prefill=[0], prefill_tensor=1, decode=[1], decode_tensor=1
    )
    mesh = folder / "1p1d.toml"
    mesh.write_text(text.replace("128", str(CONTEXT)).replace("pages = 33", "pages = 300"))
    with launch(str(model), mesh, router={"local_prefill_tokens": 0}) as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in (*OPTIONS, "--window-size=1440,900"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as driver:
        driver.set_script_timeout(20)
        yield driver


@pytest.fixture
def page(chromium: webdriver.Chrome, server: Server) -> Iterator[webdriver.Chrome]:
    """The page of a server without a key; it must have nothing to complain of at the end."""
    open_page(chromium, server)
    wait_for(lambda: shown(chromium, "health") == "ok")
    yield chromium
    assert chromium.get_log("browser") == []


def open_page(driver: webdriver.Chrome, server: Server, key: str | None = None) -> None:
    doors = server.serve(0, None, api_key=key)
    driver.get(f"http://127.0.0.1:{doors.http_port}/")


def wait_for(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `check` gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
    return found


def shown(driver: webdriver.Chrome, name: str) -> str:
    return driver.find_element(By.ID, name).text


def ask(driver: webdriver.Chrome, prompt: str, max_tokens: int) -> None:
    for name, value in (("max-tokens", max_tokens), ("temperature", 0)):
        script = "document.getElementById(arguments[0]).value = arguments[1]"
        driver.execute_script(script, name, str(value))
    driver.find_element(By.ID, "prompt").send_keys(prompt + Keys.ENTER)


def turns(driver: webdriver.Chrome) -> list[WebElement]:
    return driver.find_elements(By.CLASS_NAME, "turn")


def phases(turn: WebElement) -> str:
    """What stands under an answer that has ended."""
    notes = [note.text for note in turn.find_elements(By.CLASS_NAME, "note")]
    return next((note for note in notes if "TTFT" in note), "")


def test_an_answer_streams_and_shows_its_phases(page: webdriver.Chrome, server: Server) -> None:
    assert shown(page, "model") == server.model_name
    evil = "<img src=x onerror=alert(1)>"
    ask(page, evil, max_tokens=400)
    lengths = set[int]()

    def is_done() -> str:
        script = "return document.querySelector('.answer').textContent.length"
        lengths.add(page.execute_script(script))
        return phases(turns(page)[0])

    note = wait_for(is_done)
    assert len(lengths) > 3, "the answer came at once"
    for word in ("queue", "prefill", "transfer", "decode", "→ 400 tokens", "TTFT", "TPOT"):
        assert word in note
    assert page.find_element(By.CLASS_NAME, "asked").text == evil
    assert not page.find_elements(By.TAG_NAME, "img")
    wait_for(lambda: "1 requests" in shown(page, "tpot-summary"))
    gauge = page.find_elements(By.CSS_SELECTOR, "#gauges .gauge")
    assert [card.text.split("\n")[0] for card in gauge] == ["prefill-0", "decode-0"]
    assert "of 299" in gauge[1].text and "of 4 slots" in gauge[1].text


WATCH = """
    window.growth = [];
    const answers = document.getElementById("answers");
    const shown = () => [...answers.querySelectorAll(".answer")];
    const stop = document.querySelector(".turn button");
    const note = () => {
      window.growth.push(shown().map((answer) => answer.textContent.length));
      if (document.querySelector(".turn:nth-child(2) .phases")) stop.click();
    };
    const what = {characterData: true, childList: true, subtree: true};
    new MutationObserver(note).observe(answers, what);
"""
PIXELS = """
    const canvas = document.getElementById("lanes");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const found = new Set();
    for (let i = 0; i < data.length; i += 4) found.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
    return [...found];
"""
PREFILL, DECODE = "47,111,222", "31,157,107"


def test_a_stream_flows_while_a_long_prompt_is_prefilled(
    page: webdriver.Chrome, server: Server
) -> None:
    num_before = len(server.trace.requests())
    ask(page, "hello", max_tokens=1900)
    wait_for(lambda: page.find_element(By.CLASS_NAME, "answer").text)
    page.execute_script(WATCH)
    page.find_element(By.ID, "long").click()
    wait_for(lambda: "stopped" in turns(page)[0].text)
    assert phases(turns(page)[1])
    assert {PREFILL, DECODE} <= set(page.execute_script(PIXELS))
    growth = page.execute_script("return window.growth")
    during = {lengths[0] for lengths in growth if lengths[1:] == [0]}
    assert len(during) > 5, "the stream stood still until the long prompt's first token"
    wait_for(lambda: len(server.trace.requests()) == num_before + 2)
    long, stream = server.trace.requests()[-2:]
    assert long.num_prompt_tokens > CONTEXT // 2 and stream.state is RequestState.CANCELLED
    [decode] = [span for span in stream.spans if span.phase == "decode"]
    [prefill] = [span for span in long.spans if span.phase == "prefill"]
    assert decode.start < prefill.start < prefill.end < decode.end


def test_the_page_asks_for_the_key(chromium: webdriver.Chrome, server: Server) -> None:
    open_page(chromium, server, KEY)
    wait_for(lambda: shown(chromium, "health") == "needs the API key")
    chromium.find_element(By.ID, "key").send_keys("wrong" + Keys.ENTER)
    wait_for(lambda: chromium.execute_script("return sessionStorage.length"))
    field = wait_for(lambda: chromium.find_elements(By.CSS_SELECTOR, "#key:enabled"))[0]
    wait_for(lambda: shown(chromium, "health") == "needs the API key")
    field.clear()
    field.send_keys(KEY + Keys.ENTER)
    wait_for(lambda: shown(chromium, "health") == "ok")
    assert not chromium.find_element(By.LINK_TEXT, "API").get_property("hidden")
    assert not chromium.find_elements(By.LINK_TEXT, "metrics")
    ask(chromium, "hello", max_tokens=4)
    wait_for(lambda: phases(turns(chromium)[0]))
    refusals = [entry["message"] for entry in chromium.get_log("browser")]
    assert refusals and all("401" in message for message in refusals)


COMPLETE = """
    const done = arguments[arguments.length - 1];
    const box = document.createElement("div");
    import("/page/chat.js").then(async ({Chat}) => {
      const chat = new Chat(box, () => {});
      chat.model = {name: arguments[0], chats: false};
      await chat.ask("hello", {max_tokens: 4, temperature: 0});
      const asked = performance.getEntriesByType("resource").map((entry) => entry.name);
      done([asked.some((name) => name.endsWith("/v1/completions")), box.textContent]);
    });
"""


def test_a_model_without_a_chat_template_completes(page: webdriver.Chrome, server: Server) -> None:
    asked, text = page.execute_async_script(COMPLETE, server.model_name)
    assert asked and "→ 4 tokens" in text

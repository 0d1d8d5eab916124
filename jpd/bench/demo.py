"""`make demo`: a real server, five requests at once, and where the time of each went.

1. Start `jpd serve` as a child process on free loopback ports and wait for its ready line.
2. Send four short prompts and a long one at the same time over HTTP; stream the answers.
3. Print what the server says of each: phases, TTFT, TPOT, KV bytes moved.
Exits 0 only when every request was answered through both meshes.
"""

import argparse
import asyncio
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jpd.bench.server_process import ServerAddress, ServerFailedError, ServerProcess

SHORT_PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
)
REQUEST_TIMEOUT_SECONDS = 300.0


class DemoFailedError(Exception):
    """The demo did not show what it is there to show."""


@dataclass(slots=True)
class Answer:
    """One request as it grows."""

    name: str
    prompt: str
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None


def long_prompt(num_days: int) -> str:
    """A ship's log, the last entry left open: about 1,500 tokens in 46 days."""
    winds = ("north", "north-east", "east", "south-east", "south", "south-west", "west")
    cargo = ("timber", "salt", "wool", "copper", "grain")
    birds = ("gulls", "terns", "petrels", "gannets")
    lines = ["The log of the schooner Meridian, bound from Bergen to Lisbon.\n"]
    for day in range(1, num_days + 1):
        lines.append(
            f"Day {day}. Wind from the {winds[day % 7]}, sea moderate. We passed a brig laden with "
            f"{cargo[day % 5]} and saw {birds[day % 4]} astern. All hands well.\n"
        )
    lines.append(f"Day {num_days + 1}. Wind from the")
    return "".join(lines)


async def stream_answer(
    client: httpx.AsyncClient, model: str, answer: Answer, max_tokens: int
) -> None:
    """Send one prompt and let `answer` grow. Raises DemoFailedError when the server refuses."""
    body = {
        "model": model,
        "prompt": answer.prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_details": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise DemoFailedError(f"HTTP {response.status_code}: {text}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                take_event(answer, json.loads(line.removeprefix("data: ")))


def take_event(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise DemoFailedError(f"{answer.name}: {event['error'].get('message')}")
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        answer.text += choice.get("text") or ""
        answer.details = choice.get("details") or answer.details
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def show_answers(answers: Sequence[Answer]) -> RenderableType:
    parts: list[RenderableType] = []
    for answer in answers:
        prompt = answer.prompt if len(answer.prompt) <= 80 else f"... {answer.prompt[-64:]}"
        mark = "[green]done[/green]" if answer.finish_reason else "[yellow]...[/yellow]"
        parts.append(Text.from_markup(f"[bold]{answer.name}[/bold] {mark}"))
        parts.append(Text.assemble((prompt, "dim"), (answer.text, "cyan")))
    return Group(*parts)


def phase_table(answers: Sequence[Answer]) -> Table:
    """Narrow enough for 80 columns."""
    table = Table(title="Where the time went", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True)
    phases = ("queue", "prefill", "transfer", "decode", "ttft", "tpot")
    names = [phase.upper() if phase in ("ttft", "tpot") else phase for phase in phases]
    headers = ("prompt\ntokens", "output\ntokens", *(f"{name}\nms" for name in names))
    for header in (*headers, "KV bytes\nmoved"):
        table.add_column(header, justify="right", no_wrap=True)
    for answer in answers:
        times = (float(answer.details[f"{phase}_seconds"]) * 1000 for phase in phases)
        table.add_row(
            answer.name,
            f"{answer.usage['prompt_tokens']:,}",
            f"{answer.usage['completion_tokens']:,}",
            *(f"{time:,.0f}" for time in times),
            f"{answer.details['kv_bytes']:,}",
        )
    return table


def check_answers(answers: Sequence[Answer]) -> int:
    """The number of tokens made. Raises DemoFailedError unless all went through both meshes."""
    for answer in answers:
        if not answer.finish_reason or not answer.usage.get("completion_tokens"):
            raise DemoFailedError(f"{answer.name}: the answer has no end or no tokens")
        if not answer.details.get("kv_bytes"):
            raise DemoFailedError(f"{answer.name}: no KV moved: path {answer.details.get('path')}")
    return sum(int(answer.usage["completion_tokens"]) for answer in answers)


async def ask_all(
    address: ServerAddress, console: Console, max_tokens: int, num_days: int
) -> list[Answer]:
    """All requests at the same time, shown as they grow."""
    answers = [Answer(f"short {n}", prompt) for n, prompt in enumerate(SHORT_PROMPTS, 1)]
    answers.append(Answer("long", long_prompt(num_days)))
    async with httpx.AsyncClient(
        base_url=address.http, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False
    ) as client:
        with Live(console=console, get_renderable=lambda: show_answers(answers)):
            tasks = [
                asyncio.create_task(stream_answer(client, address.model, answer, max_tokens))
                for answer in answers
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return answers


def run_demo(options: argparse.Namespace) -> int:
    """Run it all and print; the number of tokens made. Ends the server in every case."""
    console = Console() if sys.stdout.isatty() else Console(width=140)
    arguments = ["--model", options.model, "--mesh", options.mesh]
    arguments += ["--http-port", "0", "--grpc-port", "0"]
    is_ready = threading.Event()
    with console.status("starting the server ...") as status:

        def show(line: str) -> None:
            """What the server says of its start; later its last words are kept, not shown."""
            if is_ready.is_set():
                return
            status.update(line[: console.width - 4])
            if not console.is_terminal:
                console.print(line, highlight=False, markup=False, style="dim")

        server = ServerProcess(arguments, on_line=show)
        with server:
            try:
                address = server.wait_ready(options.start_seconds)
                is_ready.set()
                status.stop()
                console.print(
                    f"server ready after {address.start_seconds:.1f} s: {address.http}, "
                    f"gRPC {address.grpc}, model {address.model}",
                    highlight=False,
                )
                asking = ask_all(address, console, options.max_tokens, options.log_days)
                answers = asyncio.run(asking)
            except httpx.HTTPError as error:
                raise ServerFailedError(f"{error!r}\n{server.last_words()}") from error
    num_tokens = check_answers(answers)
    console.print("\n" if not console.is_terminal else "", phase_table(answers), sep="")
    console.print(f"demo ok: {len(answers)} requests, {num_tokens} tokens", highlight=False)
    return num_tokens


def interrupt(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jpd.bench.demo", description=__doc__)
    parser.add_argument("--model", default="models/gemma-3-270m.toml")
    parser.add_argument("--mesh", default="mesh_configs/1p1d-cpu.toml")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--start-seconds", type=float, default=600.0, help="patience for ready")
    parser.add_argument("--log-days", type=int, default=46, help="length of the long prompt")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        run_demo(options)
    except KeyboardInterrupt:
        print("demo stopped", file=sys.stderr)
        return 130
    except (ServerFailedError, DemoFailedError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`jpd bench all`: each benchmark in a process of its own, one after the other.

So none inherits another's threads, cores or memory, and each file of results has the command that
makes it again. Called by the command line.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jpd.bench.results import Result, Say

STOP_SECONDS = 60.0
"""For a benchmark to end its servers after a signal."""


def run_each(
    names: Sequence[str], options_of: Callable[[str], Sequence[str]], folder: Path, say: Say
) -> list[Result]:
    """How long each took, target 0 failures; results lie in `folder`/NAME.json.

    `options_of` gives the options of a benchmark beside its file. One that fails leaves the file of
    an earlier run alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results, failed, missed = [], list[str](), 0
    for name in names:
        say(f"jpd bench {name} ...")
        path, start = folder / f"{name}.json", time.monotonic()
        command = [sys.executable, "-m", "jpd", "bench", name, "--json", str(path)]
        status = _run([*command, *options_of(name)])
        results.append(Result(f"{name}: took", time.monotonic() - start, "s"))
        if status:
            failed.append(name)
            say(f"jpd bench {name}: exit status {status}")
        else:
            missed += sum(not one["ok"] for one in json.loads(path.read_text())["results"])
    total = sum(result.value for result in results)
    return [
        *results,
        Result("all: took", total, "s"),
        Result(f"all: failed{''.join(f' {name}' for name in failed)}", len(failed), "", 0.0),
        Result("all: missed targets", missed, "", 0.0),
    ]


def _run(command: Sequence[str]) -> int:
    """Its exit status; whatever ends this process ends it too, in good order."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
        raise

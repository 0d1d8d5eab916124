"""`jpd bench all`: each benchmark in a process of its own, one after the other.

So none inherits another's threads, cores or memory, and each file of results has the command that
makes it again. Called by the command line.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jpd.bench.results import Result, Say

STOP_SECONDS = 60.0
"""For a benchmark to end its servers after a signal."""
QUICK_SECONDS = 600.0
"""What a quick run of all may take; what has not ended by then has failed."""


def run_each(
    names: Sequence[str],
    options_of: Callable[[str], Sequence[str]],
    folder: Path,
    say: Say,
    limit_seconds: float = math.inf,
) -> list[Result]:
    """How long each took, target 0 failures; results lie in `folder`/NAME.json.

    `options_of` gives the options of a benchmark beside its file. One that fails, or that the limit
    of all together ends, leaves the file of an earlier run alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit_seconds
    results, failed, missed = [], list[str](), 0
    for name in names:
        say(f"jpd bench {name} ...")
        path, start = folder / f"{name}.json", time.monotonic()
        command = [sys.executable, "-m", "jpd", "bench", name, "--json", str(path)]
        status = _run([*command, *options_of(name)], max(0.0, end - start))
        results.append(Result(f"{name}: took", time.monotonic() - start, "s"))
        if status != 0:
            failed.append(name)
            is_late = status is None
            told = f"not ended in {limit_seconds:g} s" if is_late else f"exit status {status}"
            say(f"jpd bench {name}: {told}")
        else:
            missed += sum(not one["ok"] for one in json.loads(path.read_text())["results"])
    total = sum(result.value for result in results)
    return [
        *results,
        Result("all: took", total, "s"),
        Result(f"all: failed{''.join(f' {name}' for name in failed)}", len(failed), "", 0.0),
        Result("all: missed targets", missed, "", 0.0),
    ]


def _run(command: Sequence[str], limit_seconds: float) -> int | None:
    """Its exit status, None when it is late; whatever ends this ends it too, in good order."""
    if limit_seconds <= 0.0:
        return None
    process = subprocess.Popen(command)
    try:
        return process.wait(None if limit_seconds == math.inf else limit_seconds)
    except BaseException as error:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise

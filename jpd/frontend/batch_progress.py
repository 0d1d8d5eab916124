"""A bar on stderr for a batch of prompts: how many choices are done, and tokens per second.

Knows deltas, no server. Called by the Python API.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jpd.frontend.job import GenerateJob
from jpd.frontend.service import TextDelta

Hear = Callable[[TextDelta], None]


@contextlib.contextmanager
def batch_progress(job: GenerateJob, is_shown: bool) -> Iterator[Hear | None]:
    """Yields what is to be told each delta, from any thread; None when nothing is shown."""
    if not is_shown:
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task("generating", total=len(job.prompts) * job.n, rate=0.0)
    start, num_tokens = time.perf_counter(), 0

    def hear(delta: TextDelta) -> None:
        nonlocal num_tokens
        num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            rate = num_tokens / max(time.perf_counter() - start, 1e-9)
            bar.update(task, advance=1, rate=rate)

    with bar:
        yield hear

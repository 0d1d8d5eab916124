"""The picture of `jpd bench interference`: every gap over time, a panel a mode.

Called by the command line.
"""

from collections.abc import Sequence
from typing import Any

from jpd.bench.interference import Gaps
from jpd.bench.report import new_figure

TITLE = "Gaps between tokens while long prompts arrive"


def draw_gaps(gaps: Sequence[Gaps]) -> Any:
    figure = new_figure(10, 3 * len(gaps))
    panels = figure.subplots(len(gaps), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, mode in zip(panels, gaps, strict=True):
        for found, colour, label in (
            (mode.alone, "tab:blue", "streams alone"),
            (mode.loaded, "tab:orange", f"while prompts of {mode.prompt_tokens:,} tokens arrive"),
        ):
            times, seconds = zip(*found, strict=True)
            milliseconds = [second * 1000 for second in seconds]
            panel.plot(times, milliseconds, ".", markersize=3, color=colour, label=label)
        for arrival in mode.prompts:
            panel.axvline(arrival, color="0.85", linewidth=0.8, zorder=0)
        panel.set_yscale("log")
        panel.set_ylabel("gap, ms")
        panel.set_title(mode.mode, loc="left")
        panel.legend(loc="upper left", fontsize="small")
    panels[-1].set_xlabel("seconds; grey: a long prompt has its first token")
    return figure

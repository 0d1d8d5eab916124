"""Rows of the decode batch that follow a guide, and whether each can take part in the next step.

    can step ── start ──> its token is computed ── take ──> its guide thinks ── settle ──> can step

Only a guided row pauses, for the step in which its token is read; nobody waits for it. Its token is
told with the guide's verdict, so that an answer that is complete ends with its last token. Knows
guides and attempts, no device. Used by `DecodeEngine`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jpd.errors import RequestError
from jpd.guidance.guide import Guide, GuideState, Mask, wait_for_any
from jpd.request import TokenLogprobs


@dataclass(slots=True)
class _Followed:
    guide: Guide
    is_computed: bool = False  # a step that was dispatched computes its next token
    untold: tuple[int, ...] = ()  # read, but the guide has not judged them
    logprobs: tuple[TokenLogprobs, ...] = ()  # of these, if they were asked for


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a guide found after its row's tokens."""

    attempt_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    is_complete: bool  # nothing may follow
    error: RequestError | None  # the guide cannot be followed any further


class GuidedRows:
    """By attempt. Owned by the engine, on its worker's thread."""

    def __init__(self) -> None:
        self._rows: dict[str, _Followed] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def add(self, attempt_id: str, guide: Guide) -> None:
        self._rows[attempt_id] = _Followed(guide)

    def remove(self, attempt_id: str) -> None:
        """Nothing for a row that is not guided."""
        self._rows.pop(attempt_id, None)

    def can_step(self, attempt_id: str) -> bool:
        """Whether the mask of its next token is there; always, for a row that is not guided."""
        row = self._rows.get(attempt_id)
        if row is None:
            return True
        is_waiting = row.is_computed or bool(row.untold)
        return not is_waiting and row.guide.state is GuideState.OPEN

    def start(self, attempt_ids: Iterable[str]) -> Mapping[str, Mask]:
        """These rows take part in a step: the masks of those that are guided."""
        guided = [attempt_id for attempt_id in attempt_ids if attempt_id in self._rows]
        for attempt_id in guided:
            self._rows[attempt_id].is_computed = True
        return {attempt_id: self._rows[attempt_id].guide.mask for attempt_id in guided}

    def take(
        self, attempt_id: str, token_id: int, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> None:
        """The step's token was read: its guide goes on, on another thread."""
        row = self._rows[attempt_id]
        row.is_computed, row.untold, row.logprobs = False, (token_id,), logprobs
        row.guide.advance(token_id)

    def settle(self) -> list[Verdict]:
        """The verdicts that have come in. Rows that ended are forgotten."""
        verdicts = []
        for attempt_id, row in list(self._rows.items()):
            state = row.guide.state
            if row.is_computed or state is GuideState.PENDING:
                continue
            is_over = state is not GuideState.OPEN
            if row.untold or is_over:
                error = row.guide.error if state is GuideState.FAILED else None
                is_complete = state is GuideState.COMPLETE
                verdict = Verdict(attempt_id, row.untold, row.logprobs, is_complete, error)
                verdicts.append(verdict)
                row.untold, row.logprobs = (), ()
            if is_over:
                del self._rows[attempt_id]
        return verdicts

    def wait(self, timeout_seconds: float) -> None:
        """Until some guide has come to its verdict, or the time has passed."""
        pending = [row.guide for row in self._rows.values() if not row.is_computed]
        if pending:
            wait_for_any(pending, timeout_seconds)

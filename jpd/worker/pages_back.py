"""Pages that go from a decode worker back to the prefill worker: what both ends keep of it.

1. The prefill worker has taken pages for a prompt and lacks what the reservation holds: it asks.
2. The decode worker offers copies of the pages that the attempt holds there, or says that it holds
   none. 3. What arrives is written before the prompt's rest is computed; what does not arrive in
time is computed as well, and the answer says so.
Used by prefill_attempts.py and decode_attempts.py, on their workers' threads.
"""

import logging

from jpd.engine.page_outlet import PageOutlet
from jpd.transfer.missing import MissingKV
from jpd.transfer.protocol import ArrivedPiece, PageRequest
from jpd.worker.page_pool import HeldPages
from jpd.worker.protocol import SentBack

logger = logging.getLogger(__name__)


class AwaitedPages:
    """What one attempt waits for on its prefill worker."""

    def __init__(self, request: PageRequest, num_layers: int, now: float, deadline: float) -> None:
        self.request, self.deadline = request, deadline
        self._asked_time = now
        self._missing = MissingKV(range(request.page_start, self.end), num_layers)
        self._num_bytes = 0

    @property
    def end(self) -> int:
        """The first page of the sequence that is not waited for."""
        return self.request.page_start + self.request.num_pages

    @property
    def is_whole(self) -> bool:
        return self._missing.is_nothing

    def take(self, piece: ArrivedPiece) -> bool:
        """Whether all of the piece was missing; from now on it is not."""
        if not self._missing.covers(piece):
            return False
        self._missing.take(piece)
        self._num_bytes += piece.num_bytes
        return True

    def told(self, now: float, page_size: int) -> SentBack:
        """For the router."""
        num_tokens = self.request.num_pages * page_size if self.is_whole else 0
        return SentBack(num_tokens, self._num_bytes, now - self._asked_time)


def offer_back(outlet: PageOutlet, pages: HeldPages | None, request: PageRequest) -> bool:
    """Offer pages of a prefix that `pages` hold. False: they do not, and who asked is told so."""
    name, start = request.destination, request.page_start
    if name not in outlet:
        logger.warning("%s: pages were asked for by %s, unknown here", request.attempt_id, name)
        return False
    end = start + request.num_pages
    is_held = pages is not None and end * outlet.page_size(name) <= pages.num_cached_tokens
    try:
        if pages is not None and is_held:
            outlet.send(request.attempt_id, name, pages.page_ids, start, end, is_end=True)
        else:
            outlet.refuse(request.attempt_id, name, start)
    except OSError as error:  # who asked has a deadline
        logger.warning("%s: pages cannot be sent to %s: %s", request.attempt_id, name, error)
    return is_held

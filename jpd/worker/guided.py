"""From an attempt to the guide that follows its grammar.

`open_guide` for the decode batch, which asks the guide whether it is ready; `guide_to_begin` and
`completes` for a prefill, around which the event loop waits for it. Used by both roles.
"""

import asyncio
from collections.abc import Sequence

from jpd.errors import RequestError
from jpd.guidance.compiler import GrammarCompiler
from jpd.guidance.guide import Guide, GuideState
from jpd.worker.protocol import Attempt


def open_guide(
    grammars: GrammarCompiler | None, attempt: Attempt, new_token_ids: Sequence[int] = ()
) -> Guide | None:
    """A guide that has taken the attempt's output tokens: those sent before, then the new ones.

    None: the attempt is not guided. Raises RequestError where nothing can be.
    """
    grammar = attempt.sampling.grammar
    if grammar is None:
        return None
    if grammars is None:
        raise RequestError(grammar.field, grammar.kind, "needs a model with a tokenizer")
    sent = attempt.token_ids[len(attempt.token_ids) - attempt.num_output_tokens :]
    ignores_eos = attempt.sampling.ignore_eos
    return grammars.open(grammar, (*sent, *new_token_ids), ignores_eos=ignores_eos)


async def guide_to_begin(grammars: GrammarCompiler | None, attempt: Attempt) -> Guide | None:
    """An open guide for the first token. None: not guided. Raises RequestError."""
    guide = open_guide(grammars, attempt)
    if guide is not None and await _settled(guide) is GuideState.COMPLETE:
        grammar = attempt.sampling.grammar
        assert grammar is not None
        rule = "allows nothing after the answer so far"
        raise RequestError(grammar.field, grammar.text, rule)
    return guide


async def completes(guide: Guide, token_id: int) -> bool:
    """Whether the answer is complete with this token. Raises RequestError."""
    guide.advance(token_id)
    return await _settled(guide) is GuideState.COMPLETE


async def _settled(guide: Guide) -> GuideState:
    await asyncio.wrap_future(guide.running)
    if guide.state is GuideState.FAILED:
        raise guide.error
    return guide.state

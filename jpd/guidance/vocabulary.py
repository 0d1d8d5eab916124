"""A tokenizer as `llguidance` wants it: the bytes of every token of the model's vocabulary.

The same way for every kind of tokenizer. One more token is added behind the vocabulary, `end`: it
is allowed where an answer may end, whichever and however many end tokens the model has. Called by
compiler.py.
"""

from collections.abc import Sequence

from llguidance import LLTokenizer

from jpd.tokenizer import Tokenizer

_END = b"<end of answer>"
_LEAD = "\n"
"""Written before a text that is tokenised, so that nothing is added at its start."""


class TokenBytes:
    """What LLTokenizer asks of a tokenizer. `eos_token_id` is the added token."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        special: frozenset[int] = getattr(tokenizer, "special_token_ids", frozenset())
        hidden = special | frozenset(tokenizer.eos_token_ids)
        self.tokens: Sequence[bytes] = [
            b"" if token_id in hidden else tokenizer.token_bytes(token_id, False)
            for token_id in range(vocab_size)
        ] + [_END]
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self._first_ids = _first_of_each(self.tokens[:-1])

    def __call__(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly those of `text`, as the tokenizer itself would cut it.

        Asked for what a grammar leaves no choice about.
        """
        ids = self._tokenizer.encode(_LEAD + text, add_special_tokens=False)
        data = text.encode()
        for start in range(min(len(ids), 3)):
            cut = ids[start:]
            if b"".join(map(self._bytes, cut)) == data:
                return cut
        return self._longest_first(data)

    def _bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < self.eos_token_id else b""

    def _longest_first(self, data: bytes) -> list[int]:
        """Greedily the longest token that fits. Stops where the vocabulary has no token."""
        ids: list[int] = []
        position = 0
        while position < len(data):
            found = next(
                (
                    end
                    for end in range(min(len(data), position + 32), position, -1)
                    if data[position:end] in self._first_ids
                ),
                None,
            )
            if found is None:
                return ids
            ids.append(self._first_ids[data[position:found]])
            position = found
        return ids


def _first_of_each(tokens: Sequence[bytes]) -> dict[bytes, int]:
    return {token: token_id for token_id, token in reversed(list(enumerate(tokens))) if token}


def guided_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Takes about a second for 262,144 tokens. `vocab_size` is the model's, not the tokenizer's."""
    return LLTokenizer(TokenBytes(tokenizer, vocab_size))  # type: ignore[arg-type]

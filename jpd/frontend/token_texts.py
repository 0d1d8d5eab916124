"""Log-probabilities as OpenAI and vLLM show them: tokens as texts, in three shapes.

Knows tokenizer and TokenLogprobs; no request, no transport. Called by `answers`, one LogprobWriter
for each choice, because completions tell where in the text each token begins.
"""

from collections.abc import Sequence

from jpd.request import PromptLogprobs, TokenLogprobs
from jpd.tokenizer import IncrementalDecoder, Tokenizer


class TokenTexts:
    """What a single token is called: its text, or its bytes where these are no whole characters."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        data = self.data(token_id)
        if data is None or self._as_ids:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token_id: int) -> bytes | None:
        """Its bytes, special tokens spelled out; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.token_bytes(token_id, skip_special_tokens=False)


class LogprobWriter:
    """Entries of one choice, in order: the prompt's, if they are shown, before the output's."""

    def __init__(self, texts: TokenTexts, num_top: int, skip_special_tokens: bool = True) -> None:
        self._texts, self._num_top, self._skip = texts, num_top, skip_special_tokens
        self._offset = 0
        self._decoder = self._new_decoder()

    def _new_decoder(self) -> IncrementalDecoder | None:
        tokenizer = self._texts.tokenizer
        return None if tokenizer is None else IncrementalDecoder(tokenizer, self._skip)

    def begin_output(self, prompt: str | None) -> None:
        """What follows stands behind the prompt: behind this text, if it was given as one."""
        if prompt is not None:
            self._offset = len(prompt)
        self._decoder = self._new_decoder()

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[object]]:
        """The shape of completions. The token itself stands among the alternatives."""
        shape: dict[str, list[object]] = {
            "tokens": [self._texts.text(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry is None else self._alternatives(token_id, entry)
                for token_id, entry in zip(token_ids, entries, strict=True)
            ],
            "text_offset": [self._advance(token_id) for token_id in token_ids],
        }
        return shape

    def _alternatives(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        found = {self._texts.text(token_id): entry.logprob}
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        for other_id, logprob in list(top)[: self._num_top]:
            found.setdefault(self._texts.text(other_id), logprob)
        return found

    def _advance(self, token_id: int) -> int:
        """Where the token's text begins; mutates."""
        offset = self._offset
        if self._decoder is not None:
            self._offset += len(self._decoder.push((token_id,)))
        return offset

    def chat(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, object]:
        """The shape of chat completions."""
        content = [
            self._one(token_id, entry.logprob)
            | {
                "top_logprobs": [
                    self._one(other_id, logprob)
                    for other_id, logprob in zip(
                        entry.top_token_ids, entry.top_logprobs, strict=True
                    )
                ]
            }
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, object]:
        data = self._texts.data(token_id)
        token_bytes = None if data is None else list(data)
        return {"token": self._texts.text(token_id), "logprob": logprob, "bytes": token_bytes}


def prompt_entries(
    texts: TokenTexts, token_ids: Sequence[int], entries: PromptLogprobs, num_top: int
) -> list[object]:
    """vLLM's shape: for each prompt token but the first an object by token ids."""
    shown: list[object] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            shown.append(None)
            continue
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ranked = [(i, rank, value) for rank, (i, value) in enumerate(top, start=1)][:num_top]
        ranked = [(token_id, entry.rank, entry.logprob)] + [
            row for row in ranked if row[0] != token_id
        ]
        shown.append(
            {
                str(other): {"logprob": value, "rank": rank, "decoded_token": texts.text(other)}
                for other, rank, value in ranked
            }
        )
    return shown

"""A byte-level tokenizer.json small enough for the golden checkpoints, so that tests can serve them
text.

160 ids: 0 pad, 1 BOS, 2 EOS, then single bytes (all of ASCII that can be printed, and those of
SAMPLE) and a few merged tokens. Bytes it does not know are dropped from prompts.
"""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jpd.tokenizer import BYTE_LEVEL_LETTERS

VOCAB_SIZE = 160
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

SAMPLE = "é 中 🙂 👨‍👩‍👧 क्ष 🇫🇷"
"""Characters of two to four bytes, joiners and a flag; all its bytes are in the vocabulary."""

MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("o", "n"), ("Ġ", "a"))
"""In GPT-2's letters, where Ġ is a space."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)

_LETTERS = {byte: letter for letter, byte in BYTE_LEVEL_LETTERS.items()}


def tiny_vocabulary() -> dict[str, int]:
    wanted = [*b"\t\n\r", *range(0x20, 0x7F), *SAMPLE.encode(), *range(0x80, 0x100)]
    num_bytes = VOCAB_SIZE - 3 - len(MERGES)
    letters = [_LETTERS[byte] for byte in dict.fromkeys(wanted)][:num_bytes]
    tokens = [PAD, BOS, EOS, *letters, *(left + right for left, right in MERGES)]
    return {token: token_id for token_id, token in enumerate(tokens)}


def tiny_backend(*, adds_bos: bool = True) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(tiny_vocabulary(), list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (PAD, BOS, EOS)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
        )
    return backend


def write_tiny_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, adds_bos: bool = True
) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    tiny_backend(adds_bos=adds_bos).save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def copy_with_tokenizer(
    checkpoint: Path, folder: Path, *, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Copy a golden checkpoint into `folder` and give it the tiny tokenizer."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    write_tiny_tokenizer(folder, chat_template=chat_template)
    return folder

"""What two processes must agree on before one serves the other's requests.

Compared when they connect, so that a host with another release, model or page size is refused with
both values instead of giving wrong tokens. Knows no transport.
"""

import dataclasses
import hashlib
from dataclasses import dataclass

from jpd.config import DeploymentConfig
from jpd.nn.config import DecoderConfig

PROTOCOL_VERSION = 3


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that a token id, a page or a piece of KV depends on."""

    protocol_version: int
    model: str  # of its configuration, every field of it
    vocab_size: int
    dtype: str
    cache_dtype: str
    page_size: int
    max_model_len: int
    prefill_chunk: int


def fingerprint_of(model: DecoderConfig, deployment: DeploymentConfig) -> Fingerprint:
    return Fingerprint(
        protocol_version=PROTOCOL_VERSION,
        model=hashlib.sha256(repr(model).encode()).hexdigest()[:16],
        vocab_size=model.vocab_size,
        dtype=deployment.engine.dtype,
        cache_dtype=deployment.cache.dtype,
        page_size=deployment.cache.page_size,
        max_model_len=deployment.engine.served_len(model.max_len),
        prefill_chunk=deployment.engine.prefill_chunk,
    )


def differences(here: Fingerprint, there: Fingerprint) -> str:
    """Each field that differs with both values; empty when none does."""
    return ", ".join(
        f"{field.name} = {ours!r} here, {theirs!r} there"
        for field in dataclasses.fields(here)
        if (ours := getattr(here, field.name)) != (theirs := getattr(there, field.name))
    )

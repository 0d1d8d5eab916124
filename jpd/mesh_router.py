"""The mesh file's tables about requests: [router], [router.failure] and [[slo]].

Called by `jpd.mesh_file`.
"""

from typing import cast

from jpd.config import (
    DecodeLostPolicy,
    FailureConfig,
    LatePolicy,
    PolicyName,
    PrefillLostPolicy,
    RouterConfig,
    SendBackPolicy,
    SloConfig,
    TransferFailedPolicy,
)
from jpd.mesh_hosts import NAME
from jpd.toml_reader import Table


def read_router(table: Table) -> RouterConfig:
    default = RouterConfig()
    failure = table.table("failure")
    policies = FailureConfig(
        cast(PrefillLostPolicy, _choice(failure, "prefill_lost", PrefillLostPolicy)),
        cast(TransferFailedPolicy, _choice(failure, "transfer_failed", TransferFailedPolicy)),
        cast(DecodeLostPolicy, _choice(failure, "decode_lost", DecodeLostPolicy)),
    )
    failure.close()
    router = RouterConfig(
        policy=cast(PolicyName, table.choice("policy", default.policy, PolicyName)),
        local_prefill_tokens=table.integer("local_prefill_tokens", default.local_prefill_tokens),
        send_back=cast(
            SendBackPolicy, table.choice("send_back", default.send_back, SendBackPolicy)
        ),
        max_waiting=table.integer("max_waiting", default.max_waiting, low=1),
        request_timeout_seconds=_seconds(table, "request_timeout_seconds"),
        transfer_timeout_seconds=_seconds(table, "transfer_timeout_seconds"),
        session_ttl_seconds=_seconds(table, "session_ttl_seconds"),
        prefix_index_pages=table.integer(
            "prefix_index_pages", default.prefix_index_pages, low=1000
        ),
        failure=policies,
    )
    table.close()
    return router


def read_slo(table: Table) -> SloConfig:
    table.required("name", "the SLO class that requests name")
    table.required("ttft_ms", "target of the first token, milliseconds")
    table.required("tpot_ms", "target per further token, milliseconds")
    slo = SloConfig(
        name=table.text("name", "", NAME),
        ttft_ms=table.number("ttft_ms", 1.0, above=True),
        tpot_ms=table.number("tpot_ms", 1.0, above=True),
        priority=table.integer("priority", 0, low=-1000, high=1000),
        weight=table.number("weight", 1.0, low=0.01, high=1e6),
        late=cast(LatePolicy, table.choice("late", "shed", LatePolicy)),
    )
    table.close()
    return slo


def _choice(table: Table, name: str, literal: object) -> str:
    return table.choice(name, str(getattr(FailureConfig(), name)), literal)


def _seconds(table: Table, name: str) -> float:
    return table.number(name, float(getattr(RouterConfig(), name)), above=True)

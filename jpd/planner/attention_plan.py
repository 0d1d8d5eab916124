"""Whether the attention that a mesh file asks for can serve a model on its hosts.

The rules are those of `jpd.kernels.backends`; here a model's needs are read off its configuration.
Called by `jpd.planner.deployment_plan`.
"""

from typing import get_args

from jpd.config import DeploymentConfig, HostConfig
from jpd.errors import Problem
from jpd.kernels.backends import AttentionName, AttentionNeeds, broken_rule, resolve
from jpd.nn.config import DecoderConfig

KEY = "engine.attention"


def attention_problems(config: DecoderConfig, deployment: DeploymentConfig) -> list[Problem]:
    """One for each rule that is broken on some host; "auto" breaks none."""
    name = resolve(deployment.engine.attention)
    if name not in get_args(AttentionName):
        rule = f"must be one of auto, {', '.join(get_args(AttentionName))}"
        return [Problem(deployment.file, KEY, name, rule)]
    rules = (
        broken_rule(name, attention_needs(config, deployment, host)) for host in deployment.hosts
    )
    found = dict.fromkeys(rule for rule in rules if rule is not None)
    return [Problem(deployment.file, KEY, name, rule) for rule in found]


def attention_needs(
    config: DecoderConfig, deployment: DeploymentConfig, host: HostConfig
) -> AttentionNeeds:
    return AttentionNeeds(
        platform=host.platform,
        dtype=deployment.engine.dtype,
        cache_dtype=deployment.cache.dtype,
        head_dim=config.head_dim,
        is_latent=config.mla is not None,
        has_softcap=config.attention_softcap > 0,
        has_sinks=config.attention_sinks,
    )

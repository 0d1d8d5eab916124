"""DecoderConfig: everything that distinguishes one model from another, as data.

Made by `jpd.nn.families` from config.json, a card's [config] table or GGUF metadata. No jax.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]
NormStyle = Literal["pre", "pre_post", "post"]
WeightFormat = Literal["float", "int8"]
RouterStyle = Literal["softmax_topk", "topk_softmax", "sigmoid_group"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `kind` none: the layer has no positions."""

    theta: float = 10000.0
    kind: Literal["none", "default", "linear", "llama3", "yarn", "longrope"] = "default"
    rotary_dim: int = 0  # leading dims of the head that rotate; 0: all
    interleaved: bool = False
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dims
    attention_factor: float = 1.0  # multiplies cos and sin; resolved by the family
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention: the latent and the rotary key are what is cached."""

    kv_lora_rank: int
    q_lora_rank: int  # 0: queries are projected directly
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6  # of the norms over the latents


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    num_experts_per_token: int
    expert_mlp_dim: int
    router: RouterStyle
    normalize_weights: bool = True
    routed_scale: float = 1.0
    num_shared_experts: int = (
        0  # one dense MLP of num_shared_experts * expert_mlp_dim beside the routed ones
    )
    num_groups: int = 1
    num_groups_per_token: int = 1
    router_bias: bool = False  # a bias inside the router's logits
    expert_bias: bool = False
    score_correction_bias: bool = False  # added for the choice only, not for the weights
    clamped_swiglu: float = 0.0  # gpt-oss: limit of its clamped, shifted swiglu; 0: plain
    swiglu_alpha: float = 1.702  # gain of the sigmoid in the clamped swiglu


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs between layers."""

    rope: RopeConfig
    sliding_window: int | None = (
        None  # attends to this many latest positions, itself included; None: all
    )
    moe: MoeConfig | None = None  # None: dense MLP


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer."""

    family: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    max_len: int  # positions the checkpoint was made for
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # Gemma: weights are stored as offset from 1
    norm_style: NormStyle = "pre"
    activation: Activation = "silu"
    tied_embeddings: bool = False
    attention_scale: float = 0.0  # multiplies q·k; resolved by the family
    attention_softcap: float = 0.0  # 0: none
    logits_softcap: float = 0.0  # 0: none
    qk_norm: Literal["none", "head", "full"] = (
        "none"  # over each head (Qwen3, Gemma 3) or all heads at once (OLMo 2)
    )
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    mla: MlaConfig | None = None
    weights: WeightFormat = "float"  # how matrices are held; norms, biases and routers never int8
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def short_context(self) -> int | None:
        """Longrope: sequences that may exceed this length turn by other factors, all of them."""
        ropes = (layer.rope for layer in self.layers if layer.rope.kind == "longrope")
        lengths = (r.original_max_len for r in ropes if r.short_factor != r.long_factor)
        return min(lengths, default=None)

    @property
    def kv_width(self) -> int:
        """Numbers cached per token and kv head: K and V, or MLA's latent and rotary key."""
        if self.mla is not None:
            return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return 2 * self.head_dim

    @property
    def kv_parts(self) -> tuple[int, ...]:
        """The parts of kv_width, in their order in the cache; each has its own range of values."""
        if self.mla is not None:
            return (self.mla.kv_lora_rank, self.mla.qk_rope_head_dim)
        return (self.head_dim, self.head_dim)

    @property
    def num_cached_heads(self) -> int:
        """Head axis of the KV cache: K, or 1 under MLA."""
        return 1 if self.mla is not None else self.num_kv_heads

"""Mixture of experts: the router's choice in its three kinds, and the experts.

Where devices share the experts, every token goes through every expert and the weights of those not
chosen are zero. That is exact, needs no capacity limit and no token ever leaves its device, at the
price of arithmetic. On CPU, with all experts on one device, only those that were chosen compute.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.nn.config import DecoderConfig, MoeConfig
from jpd.nn.grouped import run_chosen
from jpd.nn.layers import activation, param
from jpd.nn.linear import Linear
from jpd.nn.mlp import MLP


class MoE(nnx.Module):
    """The routed experts of one layer, and the one that all tokens share."""

    def __init__(
        self, config: DecoderConfig, moe: MoeConfig, dtype: jnp.dtype, *, is_split: bool
    ) -> None:
        experts, embed, mlp = moe.num_experts, config.embed_dim, moe.expert_mlp_dim
        into, out = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
        self.router = param((embed, experts), dtype, ("embed", "routed"))
        if moe.router_bias:
            self.router_bias = param((experts,), dtype, ("routed",))
        if moe.score_correction_bias:  # decides between close experts: never rounded
            self.score_correction = param((experts,), jnp.dtype(jnp.float32), ("routed",))
        shape, int8 = (experts, embed, mlp), config.weights == "int8"
        self.gate = Linear("btd,edf->btef", shape, dtype, into, int8=int8)
        self.up = Linear("btd,edf->btef", shape, dtype, into, int8=int8)
        shape, product = (experts, mlp, embed), "btef,efd->bted" if int8 else "btef,efd->btd"
        self.down = Linear(product, shape, dtype, out, int8=int8)
        if moe.expert_bias:
            self.gate_bias = param((experts, mlp), dtype, ("experts", "expert_mlp"))
            self.up_bias = param((experts, mlp), dtype, ("experts", "expert_mlp"))
            self.down_bias = param((experts, embed), dtype, ("experts", "embed"))
        if moe.num_shared_experts:
            shared_dim = moe.num_shared_experts * mlp
            self.shared = MLP(
                embed, shared_dim, dtype, act=config.activation, bias=config.mlp_bias, int8=int8
            )
        self.moe, self.act, self.int8, self.is_split = moe, config.activation, int8, is_split

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] → the same shape."""
        weights = self._weights(x).astype(x.dtype)
        if self.is_split:
            out = self._run_all(x, weights)
        else:
            out = jax.lax.platform_dependent(
                x, weights, cpu=self._run_chosen, default=self._run_all
            )
        return out + self.shared(x) if self.moe.num_shared_experts else out

    def _run_chosen(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        moe = self.moe
        flat, shares = x.reshape(-1, x.shape[-1]), weights.reshape(-1, moe.num_experts)
        shares, experts = jax.lax.top_k(shares, moe.num_experts_per_token)
        return run_chosen(flat, experts, shares, moe.num_experts, self._run_one).reshape(x.shape)

    def _run_one(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """x [R, D] through one expert."""
        gate, up = self.gate.of_one(x, expert), self.up.of_one(x, expert)
        if self.moe.expert_bias:
            gate, up = gate + self.gate_bias[...][expert], up + self.up_bias[...][expert]
        out = self.down.of_one(self._activate(gate, up), expert)
        return out + self.down_bias[...][expert] if self.moe.expert_bias else out

    def _run_all(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        gate, up = self.gate(x), self.up(x)
        if self.moe.expert_bias:
            gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
        hidden = self._activate(gate, up) * weights[..., None]
        out = self.down(hidden)
        if self.int8:  # each expert has scales of its own, so its sums stay apart until here
            out = out.sum(axis=2)
        if self.moe.expert_bias:
            out = out + weights @ self.down_bias[...]
        return out

    def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = self.moe.clamped_swiglu
        if not limit:
            return activation(self.act)(gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(gate * self.moe.swiglu_alpha) * (up + 1)

    def _weights(self, x: jax.Array) -> jax.Array:
        """float32 [B, T, E]: each token's weight for each expert, zero for those not chosen."""
        moe = self.moe
        logits = x.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        if moe.router_bias:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        match moe.router:
            case "softmax_topk":
                scores = jax.nn.softmax(logits, axis=-1)
                chosen = _top_mask(scores, moe.num_experts_per_token)
            case "topk_softmax":
                chosen = _top_mask(logits, moe.num_experts_per_token)
                return jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), axis=-1)
            case "sigmoid_group":
                scores = jax.nn.sigmoid(logits)
                chosen = self._choose_in_groups(scores)
        weights = jnp.where(chosen, scores, 0.0)
        if moe.normalize_weights:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * moe.routed_scale

    def _choose_in_groups(self, scores: jax.Array) -> jax.Array:
        """The best experts of the groups whose two best experts are best."""
        moe = self.moe
        choice = scores + self.score_correction[...] if moe.score_correction_bias else scores
        groups = choice.reshape(*choice.shape[:-1], moe.num_groups, -1)
        best_two = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(axis=-1)
        open_groups = _top_mask(best_two, moe.num_groups_per_token)
        choice = jnp.where(open_groups[..., None], groups, -jnp.inf).reshape(choice.shape)
        return _top_mask(choice, moe.num_experts_per_token)


def _top_mask(scores: jax.Array, k: int) -> jax.Array:
    """True for the k highest along the last axis; of equals the first ones."""
    _, indices = jax.lax.top_k(scores, k)
    return jnp.any(jax.nn.one_hot(indices, scores.shape[-1], dtype=jnp.bool_), axis=-2)

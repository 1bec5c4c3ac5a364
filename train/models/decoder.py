"""A decoder-only transformer whose parameter names and conventions are those of Llama and Qwen checkpoints."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from train.models.config import DecoderConfig
from train.models.layers import (
    Embed,
    Linear,
    RMSNorm,
    apply_rope,
    attend,
    causal_mask,
    token_positions,
)
from train.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Rotated keys and values, [layers, B, S, K, H] (no leading axis inside a layer)."""

    key: jax.Array
    value: jax.Array

    def write(self, new: "KeyValues", column: int | jax.Array) -> "KeyValues":
        """This cache with `new` written into it.

        Args:
          new: fewer columns, of the same rows and layers.
          column: where they begin; a scalar, or [B] where every row has a column of its own and `new` is one column.
            A row whose column lies outside of the cache is left as it is.
        """
        axis = self.key.ndim - 3
        if jnp.ndim(column) == 0:
            return jax.tree.map(lambda old, x: lax.dynamic_update_slice_in_dim(old, x, column, axis), self, new)

        def put(old: jax.Array, x: jax.Array, where: jax.Array) -> jax.Array:
            return old.at[..., where, :, :].set(x[..., 0, :, :], mode="drop", wrap_negative_indices=False)

        rows = axis - 1
        return jax.tree.map(lambda old, x: jax.vmap(put, (rows, rows, 0), rows)(old, x, column), self, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer shares: positions [B, T], mask [B, 1, T, S], and the queries' cache column: scalar or [B]."""

    positions: jax.Array
    mask: jax.Array
    column: int | jax.Array = 0


class Attention(nn.Module):
    """Grouped-query self-attention; returns its output and the new keys and values."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, past: KeyValues | None, context: Context) -> tuple[jax.Array, KeyValues]:
        config = self.config

        def project(name: str, heads: int, axis: str) -> jax.Array:
            linear = Linear(heads * config.head_dim, ("embed", axis), config.qkv_bias, lora=config.lora, name=name)
            return linear(x).reshape(*x.shape[:-1], heads, config.head_dim)

        query = project("q_proj", config.heads, "heads")
        key = project("k_proj", config.kv_heads, "kv_heads")
        value = project("v_proj", config.kv_heads, "kv_heads")
        if config.qk_norm:
            query = RMSNorm(config.norm_eps, name="q_norm")(query)
            key = RMSNorm(config.norm_eps, name="k_norm")(key)
        query = apply_rope(query, context.positions, config.rope.theta)
        new = KeyValues(apply_rope(key, context.positions, config.rope.theta), value)
        seen = new if past is None else past.write(new, context.column)
        output = attend(query, seen.key, seen.value, context.mask)
        output = output.reshape(*x.shape[:-1], config.heads * config.head_dim)
        scale = (2 * config.layers) ** -0.5
        return Linear(config.width, ("heads", "embed"), False, scale, config.lora, name="o_proj")(output), new


class Mlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        gate = Linear(config.mlp_width, ("embed", "mlp"), lora=config.lora, name="gate_proj")(x)
        up = Linear(config.mlp_width, ("embed", "mlp"), lora=config.lora, name="up_proj")(x)
        scale = (2 * config.layers) ** -0.5
        down = Linear(config.width, ("mlp", "embed"), False, scale, config.lora, name="down_proj")
        return down(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One pre-norm block, in the form `nn.scan` needs: carry in, (carry, new keys and values) out."""

    config: DecoderConfig
    keep: bool

    @nn.compact
    def __call__(self, x: jax.Array, past: KeyValues | None, context: Context) -> tuple[jax.Array, KeyValues | None]:
        eps = self.config.norm_eps
        mixed, new = Attention(self.config, name="self_attn")(RMSNorm(eps, name="input_layernorm")(x), past, context)
        x = x + mixed
        x = x + Mlp(self.config, name="mlp")(RMSNorm(eps, name="post_attention_layernorm")(x))
        return constrain(x, "rows", None, None), new if self.keep else None


class Decoder(nn.Module):
    """Tokens to hidden states; the head is a parameter (`train.policy.head`), so that logits need not exist."""

    config: DecoderConfig

    @nn.compact
    def run(
        self, tokens: jax.Array, context: Context, past: KeyValues | None, keep: bool
    ) -> tuple[jax.Array, KeyValues | None]:
        """Hidden states [B, T, D] after the last norm, and the new keys and values if `keep`."""
        config = self.config
        x = constrain(Embed(config.vocab_size, config.width, name="embed_tokens")(tokens), "rows", None, None)
        # Activations inside a layer are recomputed in the backward pass: memory grows by one [B, T, D] a layer.
        # Inside a scan nothing can be shared between the two passes anyway, so CSE needs no barrier.
        scanned: Any = nn.scan(
            nn.remat(DecoderLayer, prevent_cse=False),
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True, "lora": True},
            in_axes=(0, nn.broadcast),
            length=config.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, new = scanned(config, keep, name="layers")(x, past, context)
        hidden = RMSNorm(config.norm_eps, name="norm")(x)
        if not config.tie_embeddings and self.is_initializing():
            Linear(config.vocab_size, ("embed", "vocab"), name="lm_head")(hidden)
        return hidden, new

    def __call__(self, tokens: jax.Array, token_mask: jax.Array) -> jax.Array:
        """Hidden states [B, T, D] of whole sequences; `token_mask` [B, T] is True at real tokens, padding anywhere."""
        return self.run(tokens, Context(token_positions(token_mask), causal_mask(token_mask)), None, False)[0]

    def prefill(self, tokens: jax.Array, token_mask: jax.Array) -> tuple[jax.Array, KeyValues]:
        """As `__call__`, and the keys and values [layers, B, T, K, H] for `decode` to go on from."""
        return self.run(tokens, Context(token_positions(token_mask), causal_mask(token_mask)), None, True)

    def decode(
        self, tokens: jax.Array, positions: jax.Array, cache: KeyValues, token_mask: jax.Array, column: jax.Array
    ) -> tuple[jax.Array, KeyValues]:
        """One more token per row.

        Args:
          tokens: [B] int32, in column `column` of the sequences; positions: [B] int32, their positions in their rows.
          cache: [layers, B, S, K, H], filled where `token_mask` is True but for `column`.
          token_mask: [B, S] bool, the columns that the token sees, itself included.
          column: int32, a scalar or [B], each row its own. A row whose column is S or more, and whose `token_mask` is
            False throughout, leaves the cache as it is; its hidden state means nothing.

        Returns:
          Hidden states [B, D], and the cache with `column` filled.
        """
        context = Context(positions[:, None], token_mask[:, None, None, :], column)
        hidden, new = self.run(tokens[:, None], context, cache, True)
        return hidden[:, 0], cache.write(new, column)

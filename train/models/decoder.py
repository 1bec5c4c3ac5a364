"""A decoder-only transformer whose parameter names and conventions are those of Hugging Face checkpoints."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.attention import Sight, cache_sight, token_positions, token_sight
from train.models.cache import KeyValues, SlotCache
from train.models.config import DecoderConfig
from train.models.group_cache import GroupCache
from train.models.layers import Embed, Linear, RMSNorm
from train.models.rope import Rotation, rotate, rotation
from train.models.sharding import constrain
from train.models.shared import SharedSight, pack, shared_sight, unpack

Variables: TypeAlias = Mapping[str, Any]
LayerCache: TypeAlias = SlotCache | GroupCache
Cache: TypeAlias = KeyValues | Sequence[LayerCache]
Turns: TypeAlias = tuple[Rotation, Rotation | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer shares.

    Attributes:
      sight: which keys the queries see.
      turn: the rotation of the queries in full layers.
      local_turn: in sliding layers, where these have a rope of their own.
      column: the queries' cache column, a scalar or [B].
    """

    sight: Sight | SharedSight
    turn: Rotation
    local_turn: Rotation | None = None
    column: int | jax.Array = 0

    def turn_of(self, sliding: bool | jax.Array) -> Rotation:
        """The rotation in a layer of this kind."""
        if self.local_turn is None:
            return self.turn
        return jax.tree.map(lambda local, full: jnp.where(sliding, local, full), self.local_turn, self.turn)


def norm(config: DecoderConfig, name: str) -> RMSNorm:
    """A norm of this decoder."""
    return RMSNorm(config.norm_eps, config.norm_offset, config.param_dtype, name=name)


def linear(
    config: DecoderConfig, name: str, features: int, axes: tuple[str, str], *, bias: bool, scale: float = 1.0
) -> Linear:
    """A projection of this decoder."""
    return Linear(features, axes, bias, scale, config.lora, config.param_dtype, config.quantization, name=name)


def layer_variables(variables: Variables, layers: int) -> list[Variables]:
    """What each layer holds, of the stacked variables of a decoder."""
    stacked = {name: tree["layers"] for name, tree in variables.items()}
    return [jax.tree.map(lambda x, layer=layer: x[layer], stacked) for layer in range(layers)]


def rotations(config: DecoderConfig, positions: jax.Array, dtype: jnp.dtype) -> Turns:
    """Of tokens at `positions` [B, T]: in full layers, and in sliding ones where these have a rope of their own."""
    local = None if config.local_rope is None else rotation(config.local_rope, config.head_dim, positions, dtype)
    return rotation(config.rope, config.head_dim, positions, dtype), local


def depth_scale(config: DecoderConfig) -> float:
    """What adds to the residual stream is drawn this much smaller, so that its size does not grow with the depth."""
    return float((2 * config.layers) ** -0.5)


class Attention(nn.Module):
    """Grouped-query self-attention; returns its output and the new keys and values."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, past: KeyValues | LayerCache | None, sliding: bool | jax.Array, context: Context
    ) -> tuple[jax.Array, KeyValues]:
        config = self.config

        def project(name: str, heads: int, axis: str) -> jax.Array:
            projected = linear(config, name, heads * config.head_dim, ("embed", axis), bias=config.qkv_bias)(x)
            return projected.reshape(*x.shape[:-1], heads, config.head_dim)

        query = project("q_proj", config.heads, "heads")
        key = project("k_proj", config.kv_heads, "kv_heads")
        value = project("v_proj", config.kv_heads, "kv_heads")
        if config.qk_norm:
            query, key = norm(config, "q_norm")(query), norm(config, "k_norm")(key)
        turn = context.turn_of(sliding)
        query, new = rotate(query, turn), KeyValues(rotate(key, turn), value)
        seen = new if past is None else past.write(new, context.column)
        output = seen.attend(
            query, context.sight, sliding=sliding, scale=config.attention_scale, softcap=config.attention_softcap
        )
        output = output.reshape(*x.shape[:-1], config.heads * config.head_dim)
        to_width = linear(
            config, "o_proj", config.width, ("heads", "embed"), bias=config.output_bias, scale=depth_scale(config)
        )
        return to_width(output), new


class Mlp(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        gate = linear(config, "gate_proj", config.mlp_width, ("embed", "mlp"), bias=config.mlp_bias)(x)
        up = linear(config, "up_proj", config.mlp_width, ("embed", "mlp"), bias=config.mlp_bias)(x)
        down = linear(
            config, "down_proj", config.width, ("mlp", "embed"), bias=config.mlp_bias, scale=depth_scale(config)
        )
        gated = nn.silu(gate) if config.activation == "silu" else nn.gelu(gate, approximate=True)
        return down(gated * up)


class DecoderLayer(nn.Module):
    """One block, in the form `nn.scan` needs: carry in, (carry, new keys and values) out.

    `flag` says whether this layer is a sliding one where the decoder has both kinds, and is None where it has one.
    """

    config: DecoderConfig
    keep: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, past: KeyValues | LayerCache | None, flag: bool | jax.Array | None, context: Context
    ) -> tuple[jax.Array, KeyValues | None]:
        config = self.config
        sliding = config.kinds[0] == "sliding" if flag is None else flag
        mixed, new = Attention(config, name="self_attn")(norm(config, "input_layernorm")(x), past, sliding, context)
        if config.post_norms:
            x = x + norm(config, "post_attention_layernorm")(mixed)
            added = Mlp(config, name="mlp")(norm(config, "pre_feedforward_layernorm")(x))
            x = x + norm(config, "post_feedforward_layernorm")(added)
        else:
            x = x + mixed
            x = x + Mlp(config, name="mlp")(norm(config, "post_attention_layernorm")(x))
        return constrain(x, "rows", None, None), new if self.keep else None


class Decoder(nn.Module):
    """Tokens to hidden states; the head is a parameter (`train.rl.policy.head`), so that logits need not exist."""

    config: DecoderConfig

    @nn.compact
    def run(
        self,
        tokens: jax.Array,
        real: jax.Array,
        positions: jax.Array,
        sight: Sight | SharedSight,
        *,
        past: Cache | None = None,
        column: int | jax.Array = 0,
        keep: bool = False,
        layers: Sequence[Variables] | None = None,
        turns: Turns | None = None,
    ) -> tuple[jax.Array, KeyValues | list[KeyValues] | None]:
        """Hidden states [B, T, D] after the last norm, and the new keys and values if `keep`.

        With `layers`, the variables of each layer, these run one after the other in place of a scan. `turns` are the
        rotations of the tokens where they are known already.
        """
        config = self.config
        x = Embed(config.vocab_size, config.width, config.dtype, config.param_dtype, name="embed_tokens")(tokens)
        if config.embed_scale is not None:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
        # What a padded token holds, NaN included, ends here: a weight of 0 on a value that is NaN would be NaN.
        x = constrain(jnp.where(real[..., None], x, 0), "rows", None, None)
        turn, local = rotations(config, positions, x.dtype) if turns is None else turns
        context = Context(sight, turn, local, column)
        if layers is None:
            x, new = self._scanned(keep)(x, past, self._flags(), context)
        else:
            assert isinstance(past, Sequence)
            new = []
            for kind, own, cache in zip(config.kinds, layers, past, strict=True):
                layer = DecoderLayer(config, keep, parent=None)
                x, one = layer.apply(own, x, cache, kind == "sliding", context)
                new.append(one)
        hidden = norm(config, "norm")(x)
        if not config.tie_embeddings and self.is_initializing():
            Linear(config.vocab_size, ("embed", "vocab"), param_dtype=config.param_dtype, name="lm_head")(hidden)
        return hidden, new

    def _flags(self) -> jax.Array | None:
        """[L] which layers are sliding, where there are both kinds."""
        kinds = self.config.kinds
        return jnp.array([kind == "sliding" for kind in kinds]) if len(set(kinds)) > 1 else None

    def _scanned(self, keep: bool) -> Any:
        """All layers as one."""
        # With "full", memory grows by one [B, T, D] a layer. Inside a scan nothing can be shared between the two passes
        # anyway, so CSE needs no barrier.
        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.config.remat == "dots" else None
        scanned: Any = nn.scan(
            nn.remat(DecoderLayer, prevent_cse=False, policy=kept),
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True, "lora": True},
            in_axes=(0, 0, nn.broadcast),
            length=self.config.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(self.config, keep, name="layers")

    def __call__(
        self,
        tokens: jax.Array,
        token_mask: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states of whole sequences.

        Args:
          tokens: [B, T] int32; token_mask: [B, T] bool, True at real tokens. Padding may be anywhere: it is never
            attended, and what it holds reaches nothing.
          positions: [B, T] int32; None counts the real tokens of the row, or of the segment.
          segment_ids: [B, T] int32, each at least 0: several sequences in a row, one run of equal numbers each, do not
            see each other. None: a row is one sequence.

        Returns:
          [B, T, D], finite but meaningless at padding.
        """
        return self._whole(tokens, token_mask, positions, segment_ids, keep=False)[0]

    def grouped(self, tokens: jax.Array, token_mask: jax.Array, *, prompt: int, group: int) -> jax.Array:
        """Hidden states of completions of shared prompts, each of which goes through the layers once.

        Args:
          tokens: [B, P + C] int32; token_mask: [B, P + C] bool, as `__call__` has them. The first P columns of each
            `group` consecutive rows are alike in both; those of the first of them are what is read.
          prompt: P.
          group: a divisor of B.

        Returns:
          [B, P + C, D], what `__call__` gives for the same rows, up to rounding.
        """
        sight = shared_sight(token_mask, prompt, group, self.config.window)
        sight = SharedSight(self._kernels(sight.prompt), self._kernels(sight.completion))
        packed = [pack(x, prompt, group) for x in (tokens, token_mask, token_positions(token_mask))]
        return unpack(self.run(*packed, sight)[0], prompt, group)

    def prefill(
        self, tokens: jax.Array, token_mask: jax.Array, positions: jax.Array | None = None
    ) -> tuple[jax.Array, KeyValues]:
        """As `__call__`, and the keys and values [layers, B, T, K, H] for `decode` to go on from."""
        hidden, new = self._whole(tokens, token_mask, positions, None, keep=True)
        assert new is not None
        return hidden, new

    def decode(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache,
        token_mask: jax.Array,
        column: int | jax.Array,
        *,
        key_positions: jax.Array | None = None,
        layers: Sequence[Variables] | None = None,
        turns: Turns | None = None,
    ) -> tuple[jax.Array, Cache]:
        """One more token per row.

        Args:
          tokens: [B] int32, in column `column` of the sequences; positions: [B] int32, their positions in their rows.
          cache: filled where `token_mask` is True but for `column`: [layers, B, S, K, H], or a `SlotCache` or a
            `GroupCache` of each of `layers`.
          token_mask: [B, S] bool, the columns that the token sees, itself included; a sliding layer sees the last ones
            of these.
          column: int32, a scalar or [B], each row its own. A row whose column is S or more, and whose `token_mask` is
            False throughout, leaves the cache as it is; its hidden state means nothing. A scalar with `layers`.
          key_positions: [B, S] int32, the positions of the columns in their rows; None: columns are in order.
          layers: the variables of each layer, as `layer_variables` gives them, in place of the stacked ones: one loop
            less, and no copy of a layer's weights out of the stack. What is compiled then grows with the depth.
          turns: what `rotations` gives for these tokens, where it is known already.

        Returns:
          Hidden states [B, D], and the cache with `column` filled.
        """
        sight = cache_sight(token_mask, self.config.window, positions, key_positions)
        real = jnp.any(token_mask, axis=-1, keepdims=True)
        hidden, new = self.run(
            tokens[:, None],
            real,
            positions[:, None],
            sight,
            past=cache,
            column=column,
            keep=True,
            layers=layers,
            turns=turns,
        )
        assert new is not None
        if isinstance(cache, KeyValues):
            return hidden[:, 0], cache.write(new, column)
        return hidden[:, 0], [old.write(own, column) for old, own in zip(cache, new, strict=True)]

    def _whole(
        self,
        tokens: jax.Array,
        token_mask: jax.Array,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
        *,
        keep: bool,
    ) -> tuple[jax.Array, KeyValues | None]:
        sight = self._kernels(token_sight(token_mask, segment_ids, self.config.window))
        if positions is None:
            positions = token_positions(token_mask, segment_ids)
        return self.run(tokens, token_mask, positions, sight, keep=keep)

    def _kernels(self, sight: Sight) -> Sight:
        """What queries see, for kernels too if the config wants any."""
        return dataclasses.replace(sight, segments=None) if self.config.attention == "xla" else sight

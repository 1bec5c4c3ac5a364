"""A recurrent layer between attention layers, added to the table: its state is no keys and values."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kljax
from tests import rounding
from train.models import Decoder, DecoderConfig, LayerKind, Rope, blocks, config
from train.models.blocks import state_bytes
from train.models.head import make_logits
from train.models.layers import InitKey, projection
from train.models.parameters import init_params
from train.models.self_attention import LayerContext
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, slot_states
from train.rollouts.sampler import Sampling, WindowedSampler
from train.sequences.forest import group_forest

DECAY = 0.7
SHAPE = DecoderConfig(
    vocab_size=24, layers=5, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24, rope=Rope(100.0)
)
BOUND = rounding.of_decoder(layers=SHAPE.layers, longest_sum=SHAPE.mlp_width)
PROMPT, NEW_TOKENS, GROUP = 5, 8, 2
LENGTHS = (5, 2, 4)
ROWS = GROUP * len(LENGTHS)
LIMITS = (8, 1, 3, 7, 8, 5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentSums:
    """Decayed sums of the tokens so far: [N, D], or [L, N, D] of a stack. Both a `PromptState` and a `LayerState`."""

    value: jax.Array

    def for_rows(self, group: int, columns: int) -> "RecurrentSums":
        return RecurrentSums(jnp.repeat(self.value, group, axis=-2))

    def layers(self) -> list["RecurrentSums"]:
        return [RecurrentSums(value) for value in self.value]

    def at_layer(self, number: jax.Array) -> "StackedSums":
        return StackedSums(self, number)

    def write_prompt(self, new: "RecurrentSums", row: jax.Array) -> "RecurrentSums":
        return RecurrentSums(self.value.at[..., row, :].set(new.value[..., 0, :]))

    def doubled(self) -> "RecurrentSums":
        return self

    def advance(self, inputs: jax.Array) -> tuple[jax.Array, "RecurrentSums"]:
        value = DECAY * self.value + inputs
        return value, RecurrentSums(value)


@dataclasses.dataclass(frozen=True)
class StackedSums:
    """One layer of a stack."""

    stack: RecurrentSums
    number: jax.Array

    def advance(self, inputs: jax.Array) -> tuple[jax.Array, "StackedSums"]:
        value = DECAY * self.stack.value[self.number] + inputs
        return value, StackedSums(RecurrentSums(self.stack.value.at[self.number].set(value)), self.number)


class Recurrent(nnx.Module):
    """`h_t = decay * h_(t-1) + W_in x_t`, `y_t = W_out h_t` over the real tokens of a row."""

    rows_may_join: ClassVar[bool] = False

    def __init__(self, config: DecoderConfig, key: InitKey):
        sizes, axes = (config.width, config.width), ("embed", "mlp")
        self.in_proj = projection(config, "in_proj", sizes, axes, key)
        self.out_proj = projection(config, "out_proj", sizes, axes[::-1], key)

    def __call__(self, x: jax.Array, state: Any, sliding: Any, context: LayerContext) -> tuple[jax.Array, Any]:
        inputs = self.in_proj(x)
        if state is not None:
            value, state = state.advance(inputs[:, 0])
            return self.out_proj(value[:, None]), state

        def advance(value: jax.Array, column: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            inputs, real = column
            value = jnp.where(real[:, None], DECAY * value + inputs, value)
            return value, value

        columns = jnp.moveaxis(inputs, 1, 0), context.real.T
        value, values = jax.lax.scan(advance, jnp.zeros_like(inputs[:, 0]), columns)
        return self.out_proj(jnp.moveaxis(values, 0, 1)), RecurrentSums(value)

    @staticmethod
    def state_bytes(config: DecoderConfig, tokens: int) -> int:
        return 0


@pytest.fixture
def hybrid(monkeypatch) -> tuple[Decoder, kljax.Policy]:
    """Two recurrent layers for each of attention; the last repeat of the pattern is cut short."""
    monkeypatch.setattr(config, "AttentionKind", Literal["full", "sliding", "recurrent"])
    monkeypatch.setitem(blocks.ATTENTIONS, "recurrent", Recurrent)
    recurrent: Any = LayerKind("recurrent")  # type: ignore[arg-type]
    model = Decoder(dataclasses.replace(SHAPE, pattern=(recurrent, recurrent, LayerKind())))
    return model, kljax.Policy(init_params(model, jax.random.key(0), make_mesh()), None)


def prompts() -> tuple[jax.Array, jax.Array]:
    tokens = jax.random.randint(jax.random.key(1), (len(LENGTHS), PROMPT), 0, 24)
    return tokens, jnp.arange(PROMPT) >= PROMPT - jnp.array(LENGTHS)[:, None]


@pytest.mark.parametrize(
    ("slots", "unroll"),
    [
        (None, False),
        (3, True),
        *(pytest.param(*both, marks=pytest.mark.thorough) for both in ((None, True), (3, False))),
    ],
)
def test_recurrent_layers_decode_as_whole_sequences(hybrid, slots, unroll):
    """The log-probs of sampled tokens: rows share prompts or take slots from a queue, and the window doubles twice."""
    model, policy = hybrid
    sampler = WindowedSampler(
        model,
        make_mesh(),
        name="hybrid",
        max_new_tokens=NEW_TOKENS,
        sampling=Sampling(temperature=1.0),
        eos_ids=(),
        slots=slots,
        group=GROUP,
        widths=(2, 4, 8),
        unroll=unroll,
    )
    samples = sampler(policy, *prompts(), jax.random.key(2), {"limits": np.array(LIMITS)})
    lengths = np.asarray(samples.completion_mask.sum(1))
    np.testing.assert_array_equal(lengths, LIMITS)

    @jax.jit
    def score(params: dict, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = model.bind(params)(tokens, mask)
        logits = make_logits(model, params)(hidden[:, :-1].reshape(-1, SHAPE.width), jnp.dtype("float32"))
        log_probs = jax.nn.log_softmax(logits).reshape(*tokens[:, 1:].shape, -1)
        return jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]

    expected = score(policy.params, samples.tokens, samples.token_mask)
    sampled = np.asarray(samples.completion_mask[:, 1:])
    rounding.assert_close_by_norm(
        samples.fields["rollout_log_probs"][:, 1:][sampled], np.asarray(expected)[sampled], roundings=BOUND
    )


def test_rows_of_recurrent_layers_do_not_join(hybrid):
    model, policy = hybrid
    tokens, mask = prompts()
    sequences = Sequences(tokens, mask, group_forest(mask, jnp.full(len(mask), 2), (2, mask.shape[1] - 2), 1))
    with pytest.raises(ValueError, match=r"optim\.share_prompts: expected false for a model with recurrent layers"):
        slot_states(ScoredPolicy(model, policy), sequences)
    assert state_bytes(model.config, 10) == state_bytes(dataclasses.replace(SHAPE, layers=1), 10)

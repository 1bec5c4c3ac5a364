"""What a policy (base parameters, optional adapter) computes: weights, hidden states, token statistics, values."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import kljax
from train.config.types import Direction
from train.models import Decoder
from train.models.leaves import named_leaves
from train.models.sharding import constrain, mesh_is_set, param_shardings, partition_spec

Tree = Any
Reference = tuple[jax.Array, jax.Array | None]


def _draw(model: Decoder, collection: str, key: jax.Array) -> Tree:
    """The boxed variables of one collection; the other is dead code under jit."""
    tokens, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return model.init({"params": key, "lora": key}, tokens, mask)[collection]


def _abstract(model: Decoder, collection: str, mesh: Mesh) -> Tree:
    """ShapeDtypeStructs that carry their shardings."""
    boxed = jax.eval_shape(functools.partial(_draw, model, collection), jax.random.key(0))
    shapes = nn.unbox(boxed)
    shardings = param_shardings(mesh, nn.get_partition_spec(boxed), shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _initialise(model: Decoder, collection: str, key: jax.Array, mesh: Mesh) -> Tree:
    """Values drawn on the devices that will hold them; threefry is partitionable, so they do not depend on the mesh."""
    shardings = jax.tree.map(lambda x: x.sharding, _abstract(model, collection, mesh))
    return jax.jit(lambda key: nn.unbox(_draw(model, collection, key)), out_shardings=shardings)(key)


def _base(model: Decoder) -> Decoder:
    return Decoder(dataclasses.replace(model.config, lora=None))


def _check_has_lora(model: Decoder) -> None:
    if model.config.lora is None:
        raise ValueError("adapter: the model has no lora section, so there is nothing to attach an adapter to")


def abstract_params(model: Decoder, mesh: Mesh) -> Tree:
    """Shapes, dtypes and shardings of the base parameters, for restoring them."""
    return _abstract(_base(model), "params", mesh)


def abstract_adapter(model: Decoder, mesh: Mesh) -> Tree:
    """Shapes, dtypes and shardings of the adapter, for restoring it. Raises ValueError for a model without lora."""
    _check_has_lora(model)
    return _abstract(model, "lora", mesh)


def init_params(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """Base parameters, sharded over the mesh; the same values whether or not the model has a lora section."""
    return _initialise(_base(model), "params", key, mesh)


def init_adapter(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """A new adapter, sharded; B is zero, so that it changes nothing yet. Raises ValueError for a model without lora."""
    _check_has_lora(model)
    return _initialise(model, "lora", key, mesh)


def init_value_head(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """`{"kernel": [D], "bias": []}`: small weights, so that the first values are near 0."""
    width = model.config.width
    specs = {"kernel": PartitionSpec("embed"), "bias": PartitionSpec()}

    def draw(key: jax.Array) -> Tree:
        return {"kernel": jax.random.normal(key, (width,)) / (width + 1), "bias": jnp.zeros(())}

    shapes = jax.eval_shape(draw, key)
    return jax.jit(draw, out_shardings=param_shardings(mesh, specs, shapes))(key)


@functools.cache
def _adapter_layout(model: Decoder) -> dict[str, tuple[int, ...]]:
    boxed = jax.eval_shape(functools.partial(_draw, model, "lora"), jax.random.key(0))
    return _layout(nn.unbox(boxed))


def _layout(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named_leaves(tree).items()}


def variables(model: Decoder, policy: kljax.Policy) -> dict[str, Tree]:
    """The collections that `model.apply` takes; without an adapter there is no "lora".

    Raises:
      ValueError: an adapter whose names or shapes are not those that the model's lora section gives (flax would
        silently leave the ones it does not know unused).
    """
    if policy.adapter is None:
        return {"params": policy.params}
    _check_has_lora(model)
    expected, got = _adapter_layout(model), _layout(policy.adapter)
    if expected != got:
        wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
        listed = "; ".join(f"{name}: got {got.get(name)}, expected {expected.get(name)}" for name in wrong)
        raise ValueError(f"adapter does not fit the model: {listed}")
    return {"params": policy.params, "lora": policy.adapter}


def hidden_states(
    model: Decoder,
    policy: kljax.Policy,
    tokens: jax.Array,
    token_mask: jax.Array,
    *,
    prompt: int | None = None,
    group: int = 1,
) -> jax.Array:
    """Hidden states [B, T, D]; finite but meaningless at padding.

    Args:
      prompt: columns that `group` consecutive rows have in common, which go through the layers once.
    """
    if group > 1 and prompt is None:
        raise ValueError(f"prompt: got None, expected the columns that a group of {group} rows has in common")
    given = variables(model, policy)
    if group == 1:
        return model.apply(given, tokens, token_mask)
    return model.apply(given, tokens, token_mask, prompt=prompt, group=group, method="grouped")


def paired_hidden_states(
    model: Decoder,
    policy: kljax.Policy,
    adapter: Tree,
    tokens: jax.Array,
    token_mask: jax.Array,
    *,
    prompt: int | None = None,
    group: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Hidden states [B, T, D] of a policy, and of the same base with another adapter, in one pass over the layers.

    The weights of the base are read, and on a mesh gathered, once for both; what a layer computes takes twice the room.

    Args:
      policy: has an adapter.
      adapter: the other one, of the same layout; None: off.
      prompt, group: as `hidden_states` has them.
    """
    other = jax.tree.map(jnp.zeros_like, policy.adapter) if adapter is None else adapter
    pair = jax.tree.map(lambda *halves: jnp.stack(halves), policy.adapter, other)

    def run(one: Tree) -> jax.Array:
        return hidden_states(model, kljax.Policy(policy.params, one), tokens, token_mask, prompt=prompt, group=group)

    # Rows stay the leading axis, which the mesh splits.
    both = jax.vmap(run, out_axes=1)(pair)
    return both[:, 0], both[:, 1]


def stored_head(model: Decoder, params: Tree) -> jax.Array:
    """Weights of the LM head as the parameters hold them: the embedding table [V, D] if tied, else [D, V]."""
    return params["embed_tokens"]["embedding"] if model.config.tie_embeddings else params["lm_head"]["kernel"]


def head(model: Decoder, params: Tree) -> jax.Array:
    """Weights of the LM head, [D, V]: whole along D, so that the loop of a sampler does not gather them each time."""
    stored = stored_head(model, params)
    return constrain(stored.T if model.config.tie_embeddings else stored, None, "vocab")


def _lm_head(model: Decoder, params: Tree, tile: kljax.Tile | None) -> kljax.Head:
    """Returns the LM head as the parameters store it, with the cap of the model and the sharding of the mesh."""
    return kljax.Head(
        stored_head(model, params),
        softcap=model.config.final_softcap,
        layout="vd" if model.config.tie_embeddings else "dv",
        sharding=_head_sharding(model),
        tile=tile,
    )


def _head_sharding(model: Decoder) -> kljax.HeadSharding | None:
    """Rows and head where the rules of the mesh have put them; None where no mesh is set."""
    if not mesh_is_set():
        return None
    axes = ("vocab", "embed") if model.config.tie_embeddings else ("embed", "vocab")
    return kljax.HeadSharding(tokens=partition_spec(("rows",)), head=partition_spec(axes))


def token_stats(
    model: Decoder,
    policy: kljax.Policy,
    tokens: jax.Array,
    token_mask: jax.Array,
    *,
    temperature: float | jax.Array,
    mask: jax.Array | None = None,
    entropy: bool = False,
    entropy_gradient: bool = True,
    reference: Reference | None = None,
    direction: Direction = "reverse",
    tile: kljax.Tile | None = None,
    first: int = 1,
    group: int = 1,
    hidden: jax.Array | None = None,
) -> tuple[kljax.TokenStats, jax.Array]:
    """Statistics of every token given the ones before it, and the hidden states they came from.

    Nothing here has the size of tokens x vocabulary. Where the head is no part of what is differentiated (LoRA), it
    gets no gradient and is not gone through a second time.

    Args:
      tokens: [B, T] int32; token_mask: [B, T] bool.
      temperature: the one the tokens were sampled at.
      mask: [B, T] bool, the tokens that are scored; the others cost nothing. None scores all real tokens.
      entropy: whether to compute entropies too.
      entropy_gradient: whether they will be differentiated.
      reference: `(hidden, head)` of the reference for the exact KL: its hidden states [B, T, D], as this function
        returns them, and its head as `stored_head` gives it; a head of None is the policy's own, as data.
      direction: "reverse" for KL(policy || reference), "forward" for KL(reference || policy).
      tile: how much of the logits exists at a time; None takes the library's for this kind of device.
      first: first column that is wanted (the prompt length P where only completions are); those before cost nothing.
      group: consecutive rows that are alike in the columns before `first`, which go through the layers once for them.
      hidden: the hidden states [B, T, D] of the policy, where they are there already.

    Returns:
      `TokenStats` of [B, T] (position t is token t; 0 under the mask and in columns before `first`) and hidden states
      [B, T, D].
    """
    if not 1 <= first <= tokens.shape[1]:
        raise ValueError(f"first: got {first}, expected 1 to {tokens.shape[1]} (column 0 has no prediction)")
    if hidden is None:
        hidden = hidden_states(model, policy, tokens, token_mask, prompt=first, group=group)
    # The state of a token predicts the next one.
    before = slice(first - 1, tokens.shape[1] - 1)
    stats = kljax.log_probs_from_hidden(
        hidden[:, before],
        _lm_head(model, policy.params, tile),
        tokens[:, first:],
        mask=(token_mask if mask is None else mask)[:, first:],
        temperature=temperature,
        entropy="constant" if entropy and not entropy_gradient else entropy,
        reference=None
        if reference is None
        else kljax.ReferenceStates(reference[0][:, before], reference[1], direction),
    )
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (first, 0))), stats), hidden


def token_values(value_head: Tree, hidden: jax.Array) -> jax.Array:
    """Value [B, T] of the state before token t, read from the hidden state of token t - 1; position 0 is 0."""
    return kljax.shift_right(hidden @ value_head["kernel"] + value_head["bias"])

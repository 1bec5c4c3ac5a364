"""The policy (base parameters, optional adapter): its weights, hidden states, token statistics and values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

import kljax
from train.config.types import Direction
from train.models import Decoder, Transformer, ValueHead
from train.models.leaves import named_leaves
from train.models.sharding import constrain, mesh_is_set, param_shardings, partition_spec

Tree = Any
Reference = tuple[jax.Array, jax.Array | None]


def _place(shapes: Tree, axes: Tree, mesh: Mesh) -> Tree:
    """Adds to `ShapeDtypeStruct`s the shardings that their logical axes get on a mesh."""
    shardings = param_shardings(mesh, axes, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _draw(init: Callable[[jax.Array], Tree], key: jax.Array, abstract: Tree) -> Tree:
    """Draws values on the devices that will hold them; threefry is partitionable, so the mesh does not change them."""
    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))(key)


def _check_has_lora(model: Decoder) -> None:
    if model.config.lora is None:
        raise ValueError("adapter: the model has no lora section; set `model.lora`")


def abstract_params(model: Decoder, mesh: Mesh) -> Tree:
    """Describes the base parameters, for restoring them: shapes, dtypes and shardings."""
    return _place(model.structure().params, model.structure().param_axes, mesh)


def abstract_adapter(model: Decoder, mesh: Mesh) -> Tree:
    """Describes the adapter, for restoring it. Raises ValueError for a model without lora."""
    _check_has_lora(model)
    return _place(model.structure().adapter, model.structure().adapter_axes, mesh)


def init_params(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """Draws base parameters, sharded over the mesh; the same values with and without a lora section."""
    return _draw(lambda key: model.init(key)[0], key, abstract_params(model, mesh))


def init_adapter(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """Draws an adapter, sharded over the mesh. B is zero, so that it changes nothing yet.

    Raises:
      ValueError: a model without lora.
    """
    return _draw(lambda key: model.init(key)[1], key, abstract_adapter(model, mesh))


def init_value_head(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """Draws a value head, `{"kernel": [D], "bias": []}`."""
    _, shapes, axes = _value_head_structure(model.config.width)

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(ValueHead(model.config.width, key=key)))

    return _draw(init, key, _place(shapes, axes, mesh))


@functools.cache
def _value_head_structure(width: int) -> tuple[nnx.GraphDef[ValueHead], Tree, Tree]:
    """Returns the modules, shapes and logical axes of a value head."""
    graphdef, state = nnx.split(jax.eval_shape(lambda: ValueHead(width, key=jax.random.key(0))))
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.get_partition_spec(state))


def bind(model: Decoder, policy: kljax.Policy) -> Transformer:
    """Merges the weights of a policy with the modules of the decoder.

    Raises:
      ValueError: an adapter whose names or shapes differ from those that the model's lora section gives.
    """
    if policy.adapter is not None:
        _check_has_lora(model)
        expected, got = _shapes(model.structure().adapter), _shapes(policy.adapter)
        if expected != got:
            wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
            listed = "; ".join(f"{name}: got {got.get(name)}, expected {expected.get(name)}" for name in wrong)
            raise ValueError(f"adapter does not fit the model: {listed}")
    return model.bind(policy.params, policy.adapter)


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named_leaves(tree).items()}


def hidden_states(
    model: Decoder,
    policy: kljax.Policy,
    tokens: jax.Array,
    token_mask: jax.Array,
    *,
    prompt: int | None = None,
    group: int = 1,
) -> jax.Array:
    """Computes hidden states [B, T, D]; finite but meaningless at padding.

    Args:
      model: the decoder.
      policy: its weights.
      tokens: [B, T] int32.
      token_mask: [B, T] bool, True at real tokens.
      prompt: columns that `group` consecutive rows have in common, which go through the layers once.
      group: rows of a prompt.
    """
    if group == 1:
        return bind(model, policy)(tokens, token_mask)
    if prompt is None:
        raise ValueError(f"prompt: got None, expected the number of columns that a group of {group} rows shares")
    return bind(model, policy).grouped(tokens, token_mask, prompt=prompt, group=group)


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
    """Computes hidden states [B, T, D] of a policy and of its base with another adapter, in one pass over the layers.

    The base weights are read, and on a mesh gathered, once for both; activations take twice the memory.

    Args:
      model: the decoder.
      policy: base parameters and an adapter.
      adapter: the other adapter, of the same structure; None: off.
      tokens: [B, T] int32.
      token_mask: [B, T] bool, True at real tokens.
      prompt: see `hidden_states`.
      group: see `hidden_states`.
    """
    other = jax.tree.map(jnp.zeros_like, policy.adapter) if adapter is None else adapter
    pair = jax.tree.map(lambda *halves: jnp.stack(halves), policy.adapter, other)

    def run(one: Tree) -> jax.Array:
        return hidden_states(model, kljax.Policy(policy.params, one), tokens, token_mask, prompt=prompt, group=group)

    # Rows stay the leading axis, which the mesh splits.
    both = jax.vmap(run, out_axes=1)(pair)
    return both[:, 0], both[:, 1]


def stored_head(model: Decoder, params: Tree) -> jax.Array:
    """Returns the LM head as it is stored: the embedding table [V, D] if tied, else the kernel [D, V]."""
    return params["embed_tokens"]["embedding"] if model.config.tie_embeddings else params["lm_head"]["kernel"]


def head(model: Decoder, params: Tree) -> jax.Array:
    """Returns the LM head [D, V], not split along D, so that the sampler's loop does not gather it in every step."""
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
    """Returns the sharding of rows and head on the mesh; None if no mesh is set."""
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
    """Computes the value [B, T] of the state before token t, from the hidden state of token t - 1; 0 at position 0."""
    graphdef, *_ = _value_head_structure(hidden.shape[-1])
    return kljax.shift_right(nnx.merge(graphdef, value_head)(hidden))

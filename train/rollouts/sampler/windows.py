"""Sampling whose time and memory follow the longest completion, not the limit: a program for each width of KV cache.

A decode step reads all columns of its KV cache. The cache begins with a narrow window of columns for completions. When
the longest live row fills it, the window is doubled, and the program of the next width goes on.

XLA plans the memory of a program before it runs, so one program would allocate its widest cache whatever the lengths.
Hence each width has a program of its own, compiled when a row first needs it, and the host reads two flags after each.

A program makes at most `STEPS` decode steps, and is called again: between two calls a signal can end the step.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import kljax
from train.models import Decoder
from train.models.cache import DecoderState
from train.models.sharding import replicated
from train.process.interrupt import leave_if_stopping
from train.rl.tracing import traced_once
from train.rollouts.sampler.draw import Sampling
from train.rollouts.sampler.engine import Samples, State, decode, finish, sample, samples_sharding, start
from train.rollouts.sampler.stops import StopTable

FIRST_WINDOW = 128
"""A narrower first window would save less than its program takes to compile."""
STEPS = 128
"""Decode steps of a call: some seconds of a large model, beside which the host's part is nothing."""
log = logging.getLogger(__name__)


def window_widths(max_new_tokens: int) -> list[int]:
    """Lists the columns of each window: doubled until they hold `max_new_tokens`, from at least 128 on.

    Example:
      >>> window_widths(2048), window_widths(300), window_widths(100)
      ([128, 256, 512, 1024, 2048], [150, 300], [100])
    """
    doublings = max((max_new_tokens // FIRST_WINDOW).bit_length() - 1, 0)
    first = -(-max_new_tokens // 2**doublings)
    return [first << number for number in range(doublings + 1)]


class WindowedSampler:
    """Completes prompts as `sample` does, with the same tokens, in windows of KV cache that grow.

    Where one window holds all tokens, and no row waits, `sample` is the only program. Otherwise the first prefills and
    decodes; each window has one that goes on; a last one collects the results. Every call ends in the same step on all
    processes, since the flags that end it are replicated.

    Attributes:
      widths: columns of each window.
      first: the program of the first window.

    Args:
      model: the decoder.
      mesh: of the programs.
      name: prefix of their names.
      max_new_tokens: C, the most tokens drawn per row.
      sampling: temperature and filters.
      eos_ids: [E], the tokens that end a row.
      stop: the table of strings that end a row, or None.
      slots: the number of rows decoded at once; None: all of them.
      group: the number of rows of each prompt, which are consecutive.
      widths: columns of each window, each twice the one before; None: `window_widths`.
      length: T, the most tokens of a row with its prompt; None: P + C.
      unroll: see `sample`.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        name: str,
        max_new_tokens: int,
        sampling: Sampling,
        eos_ids: Sequence[int],
        stop: StopTable | None = None,
        slots: int | None = None,
        group: int = 1,
        widths: Sequence[int] | None = None,
        length: int | None = None,
        unroll: bool | None = None,
    ) -> None:
        self.widths = list(widths or window_widths(max_new_tokens))
        self._name = name
        self._slots = slots
        self._group = group
        # The first window ends within a call, unless rows wait.
        steps = max(STEPS, self.widths[0])
        self._decode = functools.partial(decode, model, sampling=sampling, eos_ids=eos_ids, stop=stop, steps=steps)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "slots": slots,
            "group": group,
            "length": length,
            "unroll": unroll,
        }

        def draw_all(policy: kljax.Policy, prompts: jax.Array, mask: jax.Array, key: jax.Array, rows: Any) -> Samples:
            return sample(model, policy, prompts, mask, key=key, eos_ids=eos_ids, stop=stop, **options, **rows)

        def begin(policy: kljax.Policy, prompts: jax.Array, mask: jax.Array, key: jax.Array, rows: Any) -> Any:
            window = self.widths[0]
            state = start(model, policy, prompts, mask, key=key, window=window, **options, **rows)
            return self._advance(policy, state)

        def collect(state: State, prompts: jax.Array, mask: jax.Array) -> Samples:
            return finish(state, prompts, mask, eos_ids=eos_ids, group=group, length=length)

        results = samples_sharding(mesh)
        flags = (None, None, replicated(mesh))
        self._whole = jax.jit(traced_once(draw_all, name), out_shardings=results)
        self.first = jax.jit(traced_once(begin, self._program(0)), out_shardings=flags)
        self._collect = jax.jit(traced_once(collect, f"{name}_collect"), out_shardings=results)
        self._windows: dict[int, Callable[..., Any]] = {}
        self._flags = flags

    def __call__(
        self,
        policy: kljax.Policy,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        key: jax.Array,
        rows: Mapping[str, jax.Array] | None = None,
    ) -> Samples:
        """Completes prompts.

        Args:
          policy: the weights.
          prompts: [N, P] int32, left-padded.
          prompt_mask: [N, P] bool.
          key: the random key.
          rows: `row_ids` and `limits` of `sample`, by name.
        """
        rows = rows or {}
        count = len(prompts) * self._group
        if len(self.widths) == 1 and (self._slots is None or self._slots >= count):
            return self._whole(policy, prompts, prompt_mask, key, rows)
        number = 0
        state, layers, flags = self.first(policy, prompts, prompt_mask, key, rows)
        while True:
            running, full = np.asarray(flags)
            if not running:
                return self._collect(state, prompts, prompt_mask)
            # The programs of all processes wait for one another, so that all stop before the same one.
            leave_if_stopping(together=True)
            number += int(full)
            state, layers, flags = self.window(number)(policy, state, layers.doubled() if full else layers)

    def lower(self, policy: Any, prompts: Any, prompt_mask: Any, key: Any) -> jax.stages.Lowered:
        """Lowers `sample` as one program for arrays or their shapes.

        It has the last window from the start, so its memory is that of the longest completions.
        """
        return self._whole.lower(policy, prompts, prompt_mask, key, {})

    def window(self, number: int) -> Callable[..., Any]:
        """Makes the program that goes on in a window on first use; the state of the layers is donated."""
        if number not in self._windows:
            width = self.widths[number]
            after = self.widths[number - 1] if number else 0
            if number:
                log.info("%s: a row is longer than %d tokens; compiling for %d", self._name, after, width)

            def advance(policy: kljax.Policy, state: State, layers: DecoderState) -> Any:
                return self._advance(policy, _with_layers(state, layers), after=after, begun=True)

            program = traced_once(advance, self._program(number) if number else f"{self._program(number)}_on")
            self._windows[number] = jax.jit(program, out_shardings=self._flags, donate_argnums=2)
        return self._windows[number]

    def _advance(self, policy: kljax.Policy, state: State, **options: Any) -> tuple[State, DecoderState, jax.Array]:
        """Decodes within one window; returns the state without that of the layers, that, and two flags.

        They say whether a row goes on or waits, and whether it takes a wider window.
        """
        state = self._decode(policy, state, **options)
        flags = jnp.stack([state.is_running(), state.is_full()])
        return _with_layers(state, None), state.slots.state, flags

    def _program(self, number: int) -> str:
        return f"{self._name}_window_{self.widths[number]}"


def _with_layers(state: State, layers: DecoderState | None) -> State:
    """Replaces the state of the layers."""
    return dataclasses.replace(state, slots=dataclasses.replace(state.slots, state=layers))  # type: ignore[arg-type]

"""A server one step ahead: it samples the next batch while the trainer judges and updates on this one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.config.errors import UserError, warn
from train.context import RunContext
from train.data.prompts import encode_prompts
from train.distributed.exchange import run_together
from train.distributed.global_arrays import to_host_rows
from train.models.shard_rows import shard_rows
from train.models.sharding import batch_sharding
from train.rl.token_fields import TOKEN_FIELDS
from train.rollouts.server.source import Received, Sent, ServerSource, field_sizes
from train.rollouts.source import Completions, Request, SourceError
from train.weights.orbax import RunCheckpoints

Tree = Any


class AheadSource:
    """Requests the batch of step s + 1 with the weights of step s, when the batch of step s has arrived.

    Then the server is idle, takes the new weights, and samples while step s is judged and updated. The first batch of a
    run is requested with the weights of its own step. A checkpoint has the batch of its next step (`batch_of`): with it
    a run goes on bit by bit, also if the server would draw other tokens. The last step requests a batch too, for a run
    that is continued with more steps.
    """

    def __init__(self, context: RunContext, server: ServerSource) -> None:
        """Takes the server, which has no request under way."""
        self._context, self._server = context, server
        self._policy: tuple[kljax.Policy, int] | None = None
        self._sent: Sent | None = None
        self._received: Received | None = None
        self._error: SourceError | None = None

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Sets the weights of the next request, which are sent when the server has answered the last one."""
        self._policy = policy, step

    def sample(self, request: Request) -> Completions:
        """Returns the batch that was requested at the step before, and requests the next one.

        Raises:
          SourceError: the server stopped answering, in this step or while it worked ahead.
        """
        if self._policy is None:
            raise ValueError("policy: missing; call `update` before `sample`")
        received = self._take(request.step)
        if received is None:
            self._server.update(*self._policy)
            received = self._server.receive(self._server.send(request))
        self._received = received
        self._server.update(*self._policy)
        self._sent = self._server.send(Request.of(self._context, request.step + 1))
        return self._server.completions(request, received)

    def batch_of(self, step: int) -> Tree | None:
        """Waits for the batch of a step, and returns its rows on the devices; None if it was not requested, or failed.

        A failure is raised by the next `sample`.
        """
        try:
            received = self._take(step)
        except SourceError as error:
            warn(f"the batch that was requested ahead is lost: {error}")
            self._error = error
            return None
        if received is None:
            return None
        self._received = received
        return shard_rows(received.arrays, self._context.mesh)

    def abstract_batch(self) -> Tree:
        """Returns the shapes, dtypes and shardings of `batch_of`."""
        config = self._context.config
        sharding = batch_sharding(self._context.mesh)
        rows = config.rows_per_batch()
        width = config.data.max_prompt_length + config.data.max_completion_length
        dtypes = {"tokens": jnp.int32, "token_mask": jnp.bool, "completion_mask": jnp.bool}
        batch: dict[str, tuple[tuple[int, ...], Any]]
        batch = {name: ((rows, width), dtype) for name, dtype in dtypes.items()}
        fields = field_sizes(self._context).items()
        batch |= {name: ((rows, width, *sizes), TOKEN_FIELDS[name].dtype) for name, sizes in fields}
        batch |= {"finished": ((rows,), jnp.bool), "lags": ((rows,), jnp.int32)}
        return {name: jax.ShapeDtypeStruct(*leaf, sharding=sharding) for name, leaf in batch.items()}

    def attach(self, checkpoints: RunCheckpoints, step: int) -> None:
        """Takes the batch of a step from its checkpoint, if it is there, and saves batches with later checkpoints.

        Raises:
          UserError: the saved batch is damaged, or its prompts are not the prompts of the step.
        """
        batch = checkpoints.restore_batch(step, self.abstract_batch())
        if batch is not None:
            arrays = {name: np.asarray(array) for name, array in to_host_rows(batch).items()}
            run_together("rollout", lambda: self._check_prompts(step, arrays))
            self._received = Received(step, arrays, {})
        checkpoints.batch_of = self.batch_of

    def close(self) -> None:
        """Ends the request that is under way, and closes the server."""
        if self._sent is not None:
            self._sent.answers.cancel()
        self._server.close()

    def _take(self, step: int) -> Received | None:
        """Returns the batch of a step if it has arrived, or was requested; waits for it then."""
        if self._error is not None:
            error = self._error
            self._error = None
            raise error
        if self._received is not None and self._received.step == step:
            return self._received
        if self._sent is None or self._sent.request.step != step:
            return None
        sent = self._sent
        self._sent = None
        return self._server.receive(sent)

    def _check_prompts(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        request = Request.of(self._context, step)
        length = self._context.config.data.max_prompt_length
        tokens, mask = encode_prompts(request.examples, self._context.tokenizer, length)
        rows = request.rows.held // request.samples
        saved = np.where(arrays["token_mask"], arrays["tokens"], -1)[:, :length]
        if not np.array_equal(saved, np.where(mask, tokens, -1)[rows]):
            raise UserError(
                f"rollout.ahead: the batch that was saved with step {step} has other prompts than the data has at that "
                "step; restore the data, or resume from an earlier checkpoint"
            )

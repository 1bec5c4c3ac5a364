"""`python -m train.serve RUN_OR_CONFIG`: the policy of a run behind an endpoint that speaks as OpenAI's does."""

import argparse
from collections.abc import Sequence
from contextlib import closing

from train.config.address import is_loopback
from train.config.errors import UserError
from train.config.load import LoadedConfig
from train.eval import add_policy_arguments, load_if_config, load_policy, open_policy
from train.process.console import integer, make_parser, run_command, show_warnings
from train.process.interrupt import exit_with

EXAMPLES = """\
examples:
  python -m train.serve runs/lora                                # the last step saved, on http://127.0.0.1:8000
  python -m train.serve runs/lora --step 0 --port 8001
  python -m train.serve configs/gsm8k.yaml model.path=exports/merged rollout.top_p=0.95
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "1+2="}'
"""
POLL_SECONDS = 0.5
ROWS = 16


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = make_parser(
        "train.serve",
        "Serve a step of a run, or the model that a config starts from: chat completions, completions and token ids.",
        EXAMPLES,
    )
    add_policy_arguments(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; one of other machines needs a key")
    command.add_argument(
        "--port", type=integer(0, 65535), default=8000, help="port to listen on (default 8000); 0: a free one"
    )
    command.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key of completions")
    command.add_argument("--api-key-file", metavar="FILE", help="file with this key")
    command.add_argument(
        "--rows", metavar="N", type=integer(1), default=ROWS, help=f"sessions whose KV cache stays (default {ROWS})"
    )
    command.add_argument(
        "--max-model-len",
        metavar="N",
        type=integer(1),
        help="most tokens of a conversation; as many as a row of the run if left out",
    )
    command.add_argument(
        "--max-requests", metavar="N", type=integer(1), default=256, help="requests at one time, then 429 (default 256)"
    )
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command until a signal; the exit code is 130 then, 2 for an error that the user can fix."""
    options = parser().parse_intermixed_args(arguments)

    def command() -> None:
        loaded = load_if_config(options)
        if loaded is not None:
            show_warnings(loaded)
        serve(options, loaded)

    return run_command(command)


def serve(options: argparse.Namespace, loaded: LoadedConfig | None) -> None:
    """Serves the run or config of a command line until a signal.

    Raises:
      UserError: something cannot be read or does not fit, or nobody may listen there.
    """
    # Imported late, so that an error on the command line shows before JAX starts.
    import jax

    from train.config.load import fill_mesh, with_absolute_paths
    from train.context import make_bare_context
    from train.data.tokenizers import load_tokenizer
    from train.data.tokenizers.folder import FolderTokenizer
    from train.distributed.global_arrays import device_count
    from train.rollouts.endpoint.completions import EndpointKeys, Served
    from train.rollouts.endpoint.generator import Generator
    from train.rollouts.endpoint.sessions import SequenceLengths, Sessions
    from train.rollouts.engine.of_run import make_engine, running_engine
    from train.rollouts.jax_source import plain_sampling
    from train.rollouts.server.key import read_key
    from train.run.setup import config_mesh, with_renderer
    from train.weights.model import make_policy_model

    if options.api_key_env is not None and options.api_key_file is not None:
        raise UserError("--api-key-file: --api-key-env is set too; set only one of them")
    key = read_key("--api-key-", env=options.api_key_env, file=options.api_key_file)
    if key is None and not is_loopback(options.host):
        raise UserError(
            f"--host: got {options.host}, which other machines reach; set --api-key-env or --api-key-file as well"
        )
    try:
        from train.rollouts.endpoint.listen import listen
    except ImportError:
        raise UserError("train.serve needs uvicorn and starlette; pip install 'kljax[serve]'") from None
    saved, config = open_policy(options, loaded)
    config = fill_mesh(with_absolute_paths(config), device_count())
    tokenizer = load_tokenizer(config)
    if isinstance(tokenizer, FolderTokenizer):
        tokenizer = with_renderer(config, tokenizer)
    context = make_bare_context(config, make_policy_model(config, tokenizer), config_mesh(config), tokenizer)
    total = options.max_model_len or config.data.row_length()
    with jax.set_mesh(context.mesh):
        policy, step = load_policy(context, saved, options.step)
    served = Served(
        model=config.name,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        sampling=plain_sampling(config),
        lengths=SequenceLengths(total, total, limit=total),
        vocab_size=tokenizer.vocab_size,
        sessions=Sessions(SequenceLengths(total, total, limit=total)),
        keys=EndpointKeys(key),
        max_requests=options.max_requests,
    )
    generator = Generator()
    engine = make_engine(context, options.rows, total)
    with (
        running_engine(context, engine, policy, step or 0),
        closing(listen(served, generator, options.host, options.port, field="--port")) as listener,
    ):
        print(f"serving {served.model} after step {step or 0} on {listener.url}/v1, {total} tokens", flush=True)
        try:
            while True:
                generator.advance(engine, seconds=POLL_SECONDS)
        finally:
            generator.end_all(engine, "the server ends")


if __name__ == "__main__":
    exit_with(main())

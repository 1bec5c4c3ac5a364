"""`python -m kljax audit`: measures KL estimators on files of logits, of a batch, or of checkpoints."""

import argparse
import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kljax._files import check_outside_of_runs, local_file
from kljax.tools.audit._files import InputError, read_array, read_batch
from kljax.tools.audit._plot import have_matplotlib
from kljax.tools.audit.anchors import AnchorAudit, audit_anchors
from kljax.tools.audit.batch import audit_batch
from kljax.tools.audit.checkpoints import Checkpoints, audit_checkpoints
from kljax.tools.audit.example import example_logits
from kljax.tools.audit.logits import audit_logits
from kljax.tools.audit.report import Audit

BATCH_NEEDED = ("log_probs", "ref_log_probs", "mask")
# The policy that drew the tokens: the rollout engine if recorded, else the policy before the update.
BATCH_BEHAVIOUR = ("rollout_log_probs", "old_log_probs")
EXAMPLE_BYTES = 32
"""For each position and token of the example: its policies and their noise, eight numbers at once."""
EXAMPLES = """\
sources, one of them:
  --logits POLICY.npy --ref-logits REF.npy [--rollout-logits ROLL.npy]   arrays [N, T, V]
  --batch BATCH.npz      arrays [B, T]: log_probs, ref_log_probs, mask and, if recorded, rollout_log_probs or
                         old_log_probs (who drew the tokens) and kl, with --kl-is: exact or estimate
  --checkpoints POLICY REF --apply module:function --tokens TOKENS.npy   function(params, tokens) -> logits [N, T, V],
                         or hidden states [N, T, D] with --head module:function   function(params) -> head [D, V]
  --example              synthetic policies, see --kl, --staleness, --vocabulary, --rows, --length,
                         and --lags, --step-kl for both anchors of a KL, the reference and the sampler

It writes audit.txt, audit.json and, if matplotlib is installed, audit.png;
with --lags anchors.txt and anchors.json.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = "Bias, variance and signal-to-noise of each KL estimator against the exact KL."
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--out",
        type=local_file,
        metavar="DIR",
        default="audit",
        help="folder for the report, created if missing (%(default)s)",
    )
    add("--logits", type=local_file, metavar="NPY", help="logits of the policy [N, T, V]")
    add("--ref-logits", type=local_file, metavar="NPY", help="logits of the reference, same shape")
    add(
        "--rollout-logits",
        type=local_file,
        metavar="NPY",
        help="logits of the policy that draws the tokens, same shape",
    )
    add(
        "--mask",
        type=local_file,
        metavar="NPY",
        help="booleans [N, T], the positions to audit; for logits and checkpoints",
    )
    add("--batch", type=local_file, metavar="NPZ", help="a recorded batch")
    add(
        "--kl-is",
        choices=("exact", "estimate"),
        help="the meaning of the batch's kl: the exact KL over the vocabulary per token, then the yardstick; or an "
        "estimate from the sampled token, then left out",
    )
    add("--checkpoints", metavar=("POLICY", "REF"), nargs=2, help="two orbax checkpoints of weights")
    add("--rollout-checkpoint", metavar="PATH", help="checkpoint of the policy that draws the tokens")
    add("--item", metavar="NAME", help="dotted path of the weights inside the checkpoints")
    add(
        "--apply",
        metavar="MODULE:FUNCTION",
        help="function of weights and tokens: returns hidden states, or logits",
    )
    add(
        "--head",
        metavar="MODULE:FUNCTION",
        help="function of weights: returns the LM head of the hidden states",
    )
    add("--tokens", type=local_file, metavar="NPY", help="integers [N, T], the input of that function")
    add("--example", action="store_true", help="synthetic policies with the size and the entropy of a language model")
    add("--kl", type=float, default=0.1, help="example: mean KL(policy || reference) per token in nats (%(default)s)")
    add("--staleness", type=float, default=0.0, help="example: mean KL(policy || behaviour) in nats (on-policy)")
    add(
        "--lags",
        type=int,
        nargs="+",
        metavar="LAG",
        help="example: audits the KL to the reference and to the sampler at these lags of the sampler, in updates",
    )
    add("--step-kl", type=float, default=0.002, help="example: mean KL in nats that a lag of 1 adds (%(default)s)")
    add("--vocabulary", type=int, default=1000, help="example: number of tokens (%(default)s)")
    add("--rows", type=int, default=32, help="example: number of rows (%(default)s)")
    add("--length", type=int, default=16, help="example: positions per row (%(default)s)")
    add(
        "--draws",
        type=int,
        default=0,
        help="tokens drawn per position for a sampled measurement (%(default)s)",
    )
    add("--bootstrap", type=int, default=1000, help="bootstrap replicates, 0 for no intervals (%(default)s)")
    add("--confidence", type=float, default=0.95, help="coverage of the intervals (%(default)s)")
    add("--max-ratio", type=float, default=2.0, help="cap of the capped importance ratio (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the draws, the bootstrap and the example (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the audit in float64, prints its table and writes the report.

    Returns:
      The exit code: 0, or 2 for a mistake of the user, with the error on stderr.
    """
    try:
        out = pathlib.Path(args.out)
        if out.exists() and not out.is_dir():
            raise InputError(f"--out: {out} is not a folder")
        check_outside_of_runs(out, option="--out")
        with jax.enable_x64(True):
            audit = _audit(args)
        written = audit.write(out)
    except (InputError, ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: the arrays of the audit do not fit into memory; audit fewer rows", file=sys.stderr)
        return 2
    print(audit.table())
    print(f"\nwritten: {', '.join(str(path) for path in written)}")
    if not have_matplotlib() and not args.lags:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    return 0


def _audit(args: argparse.Namespace) -> Audit | AnchorAudit:
    sources: dict[str, tuple[Any, Callable[[argparse.Namespace, dict[str, Any]], Audit | AnchorAudit]]] = {
        "--logits": (args.logits, _from_logits),
        "--batch": (args.batch, _from_batch),
        "--checkpoints": (args.checkpoints, _from_checkpoints),
        "--example": (args.example, _from_example),
    }
    chosen = [name for name, (value, _) in sources.items() if value]
    if len(chosen) != 1:
        raise InputError(f"expected one of {', '.join(sources)}, got {' and '.join(chosen) or 'none of them'}")
    if args.lags and not args.example:
        raise InputError("--lags: only with --example; for logits of your own call kljax.audit.audit_anchors")
    if not 0 <= args.seed < 1 << 63:
        raise InputError(f"--seed: got {args.seed}, expected 0 to 2^63 - 1")
    if args.draws and args.batch is not None:
        raise InputError("--draws: a batch has no logits to draw tokens from; leave the option out")
    options: dict[str, Any] = {
        "bootstrap": args.bootstrap,
        "confidence": args.confidence,
        "max_ratio": args.max_ratio,
        "key": jax.random.key(args.seed),
    }
    return sources[chosen[0]][1](args, options)


def _from_logits(args: argparse.Namespace, options: dict[str, Any]) -> Audit:
    if args.ref_logits is None:
        raise InputError("--logits needs --ref-logits")
    behaviour = None if args.rollout_logits is None else read_array("--rollout-logits", args.rollout_logits)
    arrays = (read_array("--logits", args.logits), read_array("--ref-logits", args.ref_logits), behaviour)
    return audit_logits(*arrays, _mask(args), draws=args.draws, **options)


def _from_example(args: argparse.Namespace, options: dict[str, Any]) -> Audit | AnchorAudit:
    needed = EXAMPLE_BYTES * args.rows * args.length * args.vocabulary
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise InputError(
            f"--rows: {args.rows} rows of --length {args.length} and --vocabulary {args.vocabulary} need "
            f"{needed / 2**30:,.0f} GiB, expected at most the {memory / 2**30:.0f} GiB of this machine"
        )
    sizes = {"rows": args.rows, "length": args.length, "vocabulary": args.vocabulary}
    example = functools.partial(example_logits, **sizes, kl=args.kl, key=jax.random.key(args.seed))
    if not args.lags:
        return audit_logits(*example(staleness=args.staleness), draws=args.draws, **options)
    if args.staleness or args.step_kl <= 0 or min(args.lags) < 0:
        raise InputError(
            f"--lags: got lags {args.lags}, --step-kl {args.step_kl} and --staleness {args.staleness}, expected lags "
            "of at least 0, --step-kl above 0, and no --staleness: it is the lag times --step-kl"
        )
    logits, ref_logits, _ = example()
    samplers = {lag: example(staleness=lag * args.step_kl)[2] for lag in args.lags}
    return audit_anchors(logits, ref_logits, samplers, draws=args.draws, **options)


def _from_batch(args: argparse.Namespace, options: dict[str, Any]) -> Audit:
    batch = dict(read_batch("--batch", args.batch, needed=BATCH_NEEDED, others=(*BATCH_BEHAVIOUR, "kl")))
    if "kl" in batch and args.kl_is is None:
        raise InputError(
            f"--batch: {args.batch} has kl, expected --kl-is with it; pass --kl-is exact if it is the exact KL over "
            "the vocabulary per token, --kl-is estimate if it is an estimate, as in a dump of the parity command"
        )
    if "kl" not in batch and args.kl_is is not None:
        raise InputError(f"--kl-is: {args.batch} has no kl; leave the option out")
    if args.kl_is == "estimate":
        del batch["kl"]
    behaviour = next((batch[name] for name in BATCH_BEHAVIOUR if name in batch), None)
    mask = _booleans(f"--batch: {args.batch}: mask", batch["mask"])
    return audit_batch(batch["log_probs"], batch["ref_log_probs"], mask, batch.get("kl"), behaviour, **options)


def _from_checkpoints(args: argparse.Namespace, options: dict[str, Any]) -> Audit:
    if args.apply is None or args.tokens is None:
        raise InputError("--checkpoints needs --apply and --tokens")
    policy, reference = args.checkpoints
    return audit_checkpoints(
        read_array("--tokens", args.tokens, kinds="iu"),
        _mask(args),
        checkpoints=Checkpoints(policy, reference, args.rollout_checkpoint, item=args.item),
        apply=_function("--apply", args.apply),
        head=None if args.head is None else _function("--head", args.head),
        draws=args.draws,
        **options,
    )


def _mask(args: argparse.Namespace) -> np.ndarray | None:
    return None if args.mask is None else _booleans("--mask", np.asarray(read_array("--mask", args.mask)))


def _booleans(name: str, mask: np.ndarray) -> np.ndarray:
    """Converts a mask of 0 and 1; raises InputError for another number."""
    wrong = ~np.isin(mask, (0, 1))
    if wrong.any():
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise InputError(f"{name}: got {mask[where]} at {where}, expected 0 or 1")
    return mask.astype(bool)


def _function(option: str, name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if not function:
        raise InputError(f"{option}: got {name!r}, expected module:function")
    # `python -m` puts the working directory on the path, so modules there can be named.
    try:
        function_object = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{option}: {name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{option}: {name}: {type(error).__name__}: {error}") from error
    if not callable(function_object):
        raise InputError(f"{option}: {name} is not a function")

    def call(*arguments: Any) -> Any:
        try:
            return function_object(*arguments)
        except (Exception, SystemExit) as error:
            raise InputError(f"{option}: {name} raised {type(error).__name__}: {error}") from error

    return call

"""The schema of a dump: its arrays and the keys of its header."""

import dataclasses

FORMAT = 1
RESULT, INPUT = "result", "input"
SIDES = ("", "ref_")


@dataclasses.dataclass(frozen=True)
class Field:
    """An array of a dump.

    Attributes:
      axes: its axes: B rows, T tokens, R rows and N positions whose logits are recorded, V vocabulary, D model width,
        L layers with experts, K experts of a token.
      kind: "input" or "result"; a result is recomputed and compared.
      text: its meaning.
      whole_numbers: whether it holds integers.
      per_row: whether `[B]` in place of `[B, T]` is accepted.
    """

    axes: str
    kind: str
    text: str
    whole_numbers: bool = False
    per_row: bool = False


FIELDS: dict[str, Field] = {
    "tokens": Field("BT", INPUT, "token ids", whole_numbers=True),
    "prompt_lengths": Field("B", INPUT, "position of the first completion token", whole_numbers=True),
    "lengths": Field("B", INPUT, "position after the last token, the end-of-sequence token included", True),
    "tool_mask": Field("BT", INPUT, "0 on the tokens of a tool's answer, 1 on others", True),
    "mask": Field("BT", RESULT, "1 on trained tokens", whole_numbers=True),
    "row_ids": Field("B", INPUT, "the place of each row before the system shuffled them", whole_numbers=True),
    "group_ids": Field("B", INPUT, "the prompt of each row", whole_numbers=True),
    "micro_batch_ids": Field("B", INPUT, "the micro-batch of each row", whole_numbers=True),
    "rewards": Field("B", INPUT, "one reward per row, before the KL"),
    "divisor": Field("", INPUT, "the number of tokens that divides the loss, as the system counted it"),
    "rows": Field("R", INPUT, "the rows whose logits or hidden states are recorded: one or two suffice", True),
    "columns": Field("N", INPUT, "the positions whose logits or hidden states are recorded; all T if absent", True),
    "logits": Field("RNV", INPUT, "logits of the policy as its model returns them: position t predicts token t + 1"),
    "hidden": Field("RND", INPUT, "final hidden states of the policy, in place of logits"),
    "head": Field("DV", INPUT, "LM head of the policy, for hidden"),
    "ref_logits": Field("RNV", INPUT, "logits of the reference"),
    "ref_hidden": Field("RND", INPUT, "final hidden states of the reference"),
    "ref_head": Field("DV", INPUT, "LM head of the reference; head if absent"),
    "log_probs": Field("BT", RESULT, "log-probs of the policy that is trained"),
    "ref_log_probs": Field("BT", RESULT, "log-probs of the reference"),
    "old_log_probs": Field("BT", INPUT, "log-probs of the policy at the start of the update; log_probs if absent"),
    "rollout_log_probs": Field("BT", INPUT, "log-probs of the sampler"),
    "first_log_probs": Field("BT", INPUT, "log_probs of the first update of the batch, which judge old and sampler"),
    "routed_experts": Field("BTLK", INPUT, "experts of each token in the sampler; -1: unknown, or padding", True),
    "used_experts": Field("BTLK", RESULT, "experts of each token in the trainer; -1: unknown", True),
    "router_entropy": Field("BTL", INPUT, "entropy of the trainer's routers in nats, for a note by layer"),
    "lag": Field("B", INPUT, "RL steps since a row was sampled, for a note of other experts by lag", True),
    "values": Field("BT", INPUT, "the value function before each token, for GAE"),
    "entropy": Field("BT", INPUT, "entropy of the policy at each token, for a bonus or a quantile"),
    "ratio": Field("BT", RESULT, "importance ratio of policy and old policy, before any clip"),
    "weights": Field("BT", RESULT, "weights or mask of the rollout correction"),
    "kl": Field("BT", RESULT, "KL estimate per token, without its coefficient"),
    "advantages": Field("BT", RESULT, "advantages, per row or per token, before a KL in the advantage", per_row=True),
    "token_loss": Field("BT", RESULT, "policy loss per token with the correction's weights, without the KL term"),
    "loss": Field("", RESULT, "the loss that is differentiated, KL term included"),
    "grad_log_probs": Field("BT", RESULT, "derivative of loss by log_probs"),
}
METRIC = "metric/"

SECTIONS = (
    *("mask", "log_probs", "reference", "kl", "correction", "advantage", "loss", "entropy", "reduction"),
    "gradient",
)
KEYS = ("system", "release", "dtype", "note", "recorded_by", "eos_id", "pad_id", "group_size")
HEADER = ("kljax_parity", *KEYS, *SECTIONS)


def field_of(name: str) -> Field:
    """Returns the field of a name; a metric is a scalar result."""
    if name.startswith(METRIC):
        return Field("", RESULT, "a logged number")
    return FIELDS[name]


# The results in the order of the data, each with the stages of the recipe that it may depend on.
_LOSS = ("mask", "ratio", "correction", "kl", "kl_mask", "advantage", "loss", "entropy")
_REDUCED = (*_LOSS, "reduction", "kl_reduction")
ORDER: dict[str, tuple[str, ...]] = {
    "mask": ("mask_rule",),
    "log_probs": ("log_probs",),
    "ref_log_probs": ("reference",),
    "ratio": ("ratio",),
    "weights": ("mask", "correction"),
    "kl": ("mask", "ratio", "kl"),
    "advantages": ("mask", "ratio", "kl", "kl_mask", "advantage"),
    "token_loss": _LOSS,
    "loss": _REDUCED,
    "grad_log_probs": (*_REDUCED, "gradient"),
}
STAGES_OF_METRICS = _REDUCED

"""Reductions of a loss, as arguments of `token_weights`. `n_i` is the number of tokens of row i, `m` the mask."""

from functools import partial

from kljax.systems._row import Call, Golden, Row, on

TOKEN_MEAN, TOKEN_SUM = (Call("token_weights", {"mode": mode}) for mode in ("token_mean", "token_sum"))
COUNT, DROP = {"empty_rows": "count"}, {"empty_rows": "drop"}
WEIGHTS = "the token weights"


def _sequences(mode: str, empty_rows: dict[str, str]) -> Call:
    return Call("token_weights", {"mode": mode, **empty_rows})


MEAN_OF_MEANS, MEAN_OF_SUMS, NORMED = "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"

trinity = partial(
    Row,
    "trinity",
    "reduction",
    option="algorithm.loss_agg_mode",
    gradient=WEIGHTS,
    defaults="token-mean; it overrides the mode of the policy loss's own arguments (GSPO asks for seq-mean-token-mean)",
)


def _trinity(mode: str) -> tuple[Golden, ...]:
    return (on("aggregate_loss", loss_agg_mode=mode),)


TRINITY = (
    trinity(
        "token-mean",
        TOKEN_MEAN,
        "mean over the tokens of the micro-batch",
        divisors="number of tokens + 1e-8",
        goldens=_trinity("token-mean"),
    ),
    trinity(
        "seq-mean-token-sum",
        _sequences(MEAN_OF_SUMS, COUNT),
        "mean over all rows of the sum over their tokens",
        divisors="number of rows, those without a token included",
        note="verl drops rows without a token",
        goldens=_trinity("seq-mean-token-sum"),
    ),
    trinity(
        "seq-mean-token-mean",
        _sequences(MEAN_OF_MEANS, COUNT),
        "mean over all rows of the mean over their tokens",
        divisors="n_i + 1e-8, then number of rows, those without a token included",
        note="verl drops rows without a token",
        goldens=_trinity("seq-mean-token-mean"),
    ),
    trinity(
        "seq-mean-token-sum-norm",
        Call("token_weights", {"mode": "seq_mean_token_sum_norm", "denominator": 1.0}),
        "sum over all tokens over a constant: despite its name no mean over rows",
        given={"max_length": "normalizer, or the padded length T"},
        divisors="(normalizer or T) + 1e-8",
        note="verl since 0.9 and SkyRL divide by the number of rows as well",
        goldens=_trinity("seq-mean-token-sum-norm"),
    ),
)

verl = partial(Row, "verl", "reduction", option="actor.loss_agg_mode", gradient=WEIGHTS, defaults="token-mean")
GLOBAL = "computed from the whole mini-batch (batch_num_tokens, global_batch_size), or per micro-batch where not given"


def _verl(mode: str) -> tuple[Golden, ...]:
    return (on("agg_loss", loss_agg_mode=mode),)


VERL = (
    verl(
        "token-mean",
        TOKEN_MEAN,
        "mean over tokens",
        divisors="batch_num_tokens / dp_size; no epsilon",
        note=f"{GLOBAL}; NaN in verl where nothing is unmasked, 0 here",
        goldens=_verl("token-mean"),
    ),
    verl("token-sum", TOKEN_SUM, "sum over tokens", divisors="1 / dp_size", goldens=_verl("token-sum")),
    verl(
        "seq-mean-token-sum",
        _sequences(MEAN_OF_SUMS, DROP),
        "mean over rows with a token of the sum over their tokens",
        divisors="global_batch_size / dp_size, or the rows with a token",
        note="Trinity and SkyRL count rows without a token too; NaN in verl where nothing is unmasked",
        goldens=_verl("seq-mean-token-sum"),
    ),
    verl(
        "seq-mean-token-mean",
        _sequences(MEAN_OF_MEANS, DROP),
        "mean over rows with a token of the mean over their tokens",
        divisors="n_i + 1e-8, then global_batch_size / dp_size, or the rows with a token",
        note="Trinity, SkyRL and TRL count rows without a token too; NaN in verl where nothing is unmasked",
        goldens=_verl("seq-mean-token-mean"),
    ),
    verl(
        "seq-mean-token-sum-norm",
        _sequences(NORMED, DROP),
        "mean over rows with a token of the sum over their tokens, over a constant length",
        given={"max_length": "actor.loss_scale_factor, or the padded length T"},
        divisors="(loss_scale_factor or T) * (global_batch_size / dp_size, or the rows with a token)",
        note="before 0.9 no division by the number of rows, as in Trinity still",
        goldens=_verl("seq-mean-token-sum-norm"),
    ),
)

skyrl = partial(
    Row,
    "skyrl",
    "reduction",
    option="trainer.algorithm.loss_reduction",
    gradient="the advantages are multiplied by the weights before the loss, which is then a sum",
    defaults="token_mean",
)
NOT_KL = "the KL and entropy terms ignore it: always seq_mean_token_mean, rows without a token counted"


def _skyrl(mode: str) -> tuple[Golden, ...]:
    return (on("apply_loss_reduction_to_advantages_minibatch", loss_reduction=mode),)


SKYRL = (
    skyrl(
        "token_mean",
        TOKEN_MEAN,
        "mean over the tokens of the mini-batch",
        divisors="max(number of tokens, 1)",
        note=NOT_KL,
        goldens=_skyrl("token_mean"),
    ),
    skyrl(
        "token_mean_legacy",
        Call("token_weights", {"mode": "prompt_mean", **COUNT}),
        "mean over micro-batches of the mean over their tokens",
        given={
            "group_ids": "the micro-batch of each row: i // micro_batch_size",
            "num_groups": "mini-batch size // micro_batch_size",
        },
        divisors="max(tokens of the micro-batch, 1) * number of micro-batches",
        note="depends on the split; rows of an incomplete last micro-batch get weight 0",
        goldens=_skyrl("token_mean_legacy"),
    ),
    skyrl(
        "sequence_mean",
        _sequences(MEAN_OF_MEANS, COUNT),
        "mean over all rows of the mean over their tokens",
        divisors="max(n_i, 1) * number of rows, those without a token included",
        note=NOT_KL,
        goldens=_skyrl("sequence_mean"),
    ),
    skyrl(
        "seq_mean_token_sum_norm",
        _sequences(NORMED, COUNT),
        "mean over all rows of the sum over their tokens, over a constant length",
        given={"max_length": "trainer.algorithm.max_seq_len"},
        divisors="max_seq_len * number of rows, those without a token included",
        goldens=_skyrl("seq_mean_token_sum_norm"),
    ),
    skyrl(
        "prompt_mean",
        Call("token_weights", {"mode": "prompt_mean", **COUNT}),
        "mean over prompts of the mean over the tokens of all rows of the prompt",
        given={"group_ids": "the prompt of each row", "num_groups": "number of prompts"},
        divisors="max(tokens of the prompt, 1) * number of prompts",
        goldens=_skyrl("prompt_mean"),
    ),
)

slime = partial(Row, "slime", "reduction", gradient=WEIGHTS)
NO_SLIME_CASES = "slime is not on PyPI and its recorded cases hold no reduction"
SLIME = (
    slime(
        "sum_of_sample_mean",
        Call("token_weights", {"mode": "prompt_mean", **COUNT}),
        "mean over rollouts of the mean over the tokens of all samples of the rollout",
        option="--calculate-per-token-loss absent",
        given={"group_ids": "rollout_id of each sample", "num_groups": "number of rollouts of the step"},
        divisors="max(tokens of the rollout, 1) * rollouts of the step",
        defaults="the default",
        note="one sample a rollout makes it seq_mean_token_mean; for all terms: policy, KL and entropy",
        reason=NO_SLIME_CASES,
    ),
    slime(
        "calculate_per_token_loss",
        TOKEN_MEAN,
        "mean over the tokens of the step",
        option="--calculate-per-token-loss",
        divisors="sum over samples of max(n_i, 1): a sample without a token still adds 1",
        reason=NO_SLIME_CASES,
    ),
)

openrlhf = partial(Row, "openrlhf", "reduction", option="--actor.loss_agg_mode", gradient=WEIGHTS)
OPENRLHF = (
    openrlhf(
        "token-mean",
        TOKEN_MEAN,
        "mean over the tokens of the optimizer step",
        divisors="tokens of the step; no epsilon",
        defaults="token-mean",
        note="the KL and entropy terms always use it, whatever the policy loss does; NaN where nothing is unmasked",
        goldens=(on("aggregate_loss", token_level_loss=True),),
    ),
    openrlhf(
        "seq-mean-token-mean",
        _sequences(MEAN_OF_MEANS, DROP),
        "mean over rows with a token of the mean over their tokens",
        divisors="n_i + 1e-8, then the rows with a token",
        note="always used by the GSPO loss",
        goldens=(on("aggregate_loss", token_level_loss=False),),
    ),
)

trl = partial(Row, "trl", "reduction", option="GRPOConfig.loss_type", gradient=f"{WEIGHTS}; the KL term has the same")
WINDOW = "of one accumulation window over all processes"
TRL = (
    trl(
        "grpo",
        _sequences(MEAN_OF_MEANS, COUNT),
        "mean over all rows of the mean over their tokens, then over micro-batches",
        divisors="max(n_i, 1) * rows of the micro-batch, those without a token included",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="grpo"),),
    ),
    trl(
        "sapo",
        _sequences(MEAN_OF_MEANS, COUNT),
        "as grpo",
        divisors="max(n_i, 1) * rows of the micro-batch, those without a token included",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="sapo"),),
    ),
    trl(
        "bnpo",
        TOKEN_MEAN,
        "mean over the tokens of the micro-batch, then over micro-batches",
        divisors="max(tokens of the micro-batch, 1)",
        note="depends on the split where micro-batches differ in tokens",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="bnpo"),),
    ),
    trl(
        "dr_grpo",
        _sequences(NORMED, COUNT),
        "mean over all rows of the sum over their tokens, over a constant length",
        given={"max_length": "GRPOConfig.max_completion_length"},
        divisors="max_completion_length * rows of the micro-batch",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="dr_grpo"),),
    ),
    trl(
        "dapo",
        TOKEN_MEAN,
        "mean over the tokens of all micro-batches",
        divisors=f"max(tokens, 1), {WINDOW}",
        defaults="the default",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="dapo"),),
    ),
    trl(
        "cispo",
        TOKEN_MEAN,
        "as dapo",
        divisors=f"max(tokens, 1), {WINDOW}",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="cispo"),),
    ),
    trl(
        "vespo",
        TOKEN_MEAN,
        "as dapo",
        divisors=f"max(tokens, 1), {WINDOW}",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="vespo"),),
    ),
    trl(
        "luspo",
        _sequences(MEAN_OF_SUMS, COUNT),
        "mean over all rows of the sum over their tokens",
        divisors="rows of the micro-batch, those without a token included",
        note="before 1.16 the mean ran over padding too where the loss was per token",
        goldens=(on("GRPOTrainer._compute_loss", loss_type="luspo"),),
    ),
)

OTHERS = (
    Row(
        "art",
        "reduction",
        "mean",
        TOKEN_MEAN,
        "mean over the assistant tokens of a packed row",
        option="loss_fn(reduction=...)",
        divisors="number of tokens + 1e-6",
        gradient=WEIGHTS,
        defaults="mean; the Megatron backend sums and divides by the tokens of the step",
        goldens=(on("loss_fn", reduction="mean", mask_prob_ratio=None),),
    ),
    Row(
        "art",
        "reduction",
        "sum",
        TOKEN_SUM,
        "sum over the assistant tokens",
        option="loss_fn(reduction=...)",
        gradient=WEIGHTS,
        goldens=(on("loss_fn", reduction="sum"),),
    ),
    Row(
        "prime-rl",
        "reduction",
        "token",
        TOKEN_MEAN,
        "each component (rl, ce, ref_kl) is a sum over its tokens, over their number in the whole step",
        option="not an option",
        divisors="max(tokens of the component in the step, 1)",
        gradient=WEIGHTS,
        reason="the recorded cases are sums over one sample; the division is done by the trainer around them",
    ),
)

ROWS = (*TRINITY, *VERL, *SKYRL, *SLIME, *OPENRLHF, *TRL, *OTHERS)

"""Conditions between fields, and facts that follow from them."""

import jax.numpy as jnp
import optax
import pytest
import yaml

from tests.train.config.built import build, problems
from train.config.load import dump_yaml, parse
from train.config.plan import Plan

K1 = ("kl.loss.coef=0.1", "kl.loss.estimator=k1", "kl.loss.gradient=value")
GAE = ("advantage.type=gae", "loss.value_coef=0.5")
NORM = "loss.aggregation=seq_mean_token_sum_norm"


def test_k1_loss_with_its_value_gradient_is_refused():
    (problem,) = problems(*K1)
    assert problem.startswith("kl.loss.estimator: got k1 with kl.loss.gradient value")
    assert "E[grad log pi] = 0" in problem


@pytest.mark.parametrize(
    "change",
    [
        "kl.loss.coef=0.0",
        "kl.loss.gradient=k2",
        "kl.loss.gradient=none",
        "kl.loss.estimator=k3",
        "kl.loss.importance_corrected=true",
    ],
)
def test_k1_loss_is_fine_otherwise(change):
    build(*K1, change)


CENTERED = "optim.optimizer={type: rmsprop, centered: true, bias_correction: true, initial_scale: %s}"


def test_centered_rmsprop_with_undefined_first_update_is_refused():
    (problem,) = problems(CENTERED % 0.0)
    assert problem.startswith("optim.optimizer.bias_correction: got true with centered: true and initial_scale: 0")
    optimizer = build(CENTERED % 1.0)[0].optim.optimizer
    for initial_scale, finite in ((0.0, False), (optimizer.initial_scale, True)):
        options = optimizer.model_dump(exclude={"type"}) | {"initial_scale": initial_scale, "learning_rate": 1.0}
        update = optax.rmsprop(**options)
        gradient = jnp.linspace(1.0, 2.0, 1000)
        first, _ = update.update(gradient, update.init(gradient))
        assert bool(jnp.isfinite(first).all()) == finite


@pytest.mark.parametrize("most", [7, 12])
def test_most_tokens_are_more_than_a_prompt(most):
    (line,) = problems("data.max_prompt_length=7", "data.max_completion_length=4", f"data.max_tokens={most}")
    assert line == (
        f"data.max_tokens: got {most}, expected 8 to 11: longer than a prompt, at most with all of a completion"
    )
    (line,) = problems("data={max_prompt_length: 8, max_completion_length: 4, max_tokens: 11}", "mesh.context=4",
                       "optim.share_prompts=false")  # fmt: skip
    assert line == "data.max_tokens: got 11, expected a multiple of mesh.context = 4"


def test_packed_rows_hold_a_sequence_and_fewer_slots_than_padded_rows():
    """Four groups of one prompt, in two micro-batches: 2 x (7 + 3 x 4) slots."""
    sizes = ("data={max_prompt_length: 7, max_completion_length: 4}", "rollout.prompts_per_step=4",
             "rollout.samples_per_prompt=3", "optim.micro_batches=2")  # fmt: skip
    for slots in (10, 38):
        (line,) = problems(*sizes, "optim.packing=true", f"optim.packed_tokens={slots}")
        assert line.startswith(f"optim.packed_tokens: got {slots}, expected 11 to 37: at least the tokens of a seq")
    for slots in (11, 37):
        build(*sizes, "optim.packing=true", f"optim.packed_tokens={slots}")
    (line,) = problems(*sizes, "optim.packed_tokens=20")
    assert line == "optim.packed_tokens: got 20, but optim.packing is false; set that to true"


MESH = "mesh={fsdp: 4, tensor: 2}"
HEADS = "model={heads: 8, kv_heads: 8}"
EXPERTS = "model.experts={count: 8, width: 8}"
SAMPLING_MESHES = [
    (
        (MESH, "rollout.mesh={data: 2, tensor: 2}"),
        "rollout.mesh: got data=2 x tensor=2 = 4 devices, expected the 8 of mesh.data x mesh.fsdp x mesh.tensor",
    ),
    (
        (MESH, "rollout.mesh={data: 2, tensor: 4}"),
        "model.kv_heads: got 2, expected a multiple of rollout.mesh.tensor = 4",
    ),
    (
        ("mesh={data: 2, fsdp: 4}", HEADS, "rollout.mesh={data: 1, tensor: 8}"),
        "rollout.mesh.tensor: got 8, expected a divisor of mesh.fsdp x mesh.tensor = 4",
    ),
    (
        ("mesh={fsdp: 3, tensor: 2}", "model={heads: 6, kv_heads: 6, width: 96}", "rollout.prompts_per_step=18",
         "eval.batch_size=6", "warm_start.batch_size=6", "rollout.mesh={data: 2, tensor: 3}"),
        "rollout.mesh.tensor: got 3, expected a divisor or a multiple of mesh.tensor = 2",
    ),
    (
        ("mesh.tensor=8", HEADS, "rollout.mesh={data: 8, tensor: 1}", "eval.batch_size=4"),
        "rollout.mesh.data: got 8, expected a divisor of eval.batch_size = 4",
    ),
    (
        ("mesh.tensor=8", HEADS, "rollout={prompts_per_step: 3, samples_per_prompt: 4, mesh: {data: 8, tensor: 1}}"),
        "rollout.mesh.data: got 8, expected a divisor of rollout.prompts_per_step x rollout.samples_per_prompt = 12",
    ),
    (
        ("mesh.tensor=8", HEADS, "rollout.mesh={data: 8, tensor: 1}", "rollout.slots=4"),
        "rollout.slots: got 4, expected a multiple of rollout.mesh.data = 8, over which rows are split",
    ),
    (
        (EXPERTS, "mesh.expert=4", "rollout.mesh={data: 4, tensor: 1}"),
        "rollout.mesh: got data=4 x expert=4 x tensor=1 = 16 devices, expected the 4 of mesh.data x mesh.fsdp x "
        "mesh.expert x mesh.tensor",
    ),
    (
        (EXPERTS, "mesh={expert: 4, tensor: 2}", "rollout.mesh={data: 2, tensor: 1}", "eval.batch_size=4"),
        "rollout.mesh.data x mesh.expert: got 8, expected a divisor of eval.batch_size = 4",
    ),
    (
        (MESH, "rollout.mesh={data: 4, tensor: 2}", "rollout.in_place=true"),
        "rollout.in_place: got true, but rollout.mesh needs a copy of the weights; set only one of them",
    ),
    (
        ("rollout.dtype=bfloat16", "rollout.in_place=true"),
        "rollout.in_place: got true, but rollout.dtype needs a copy of the weights; set only one of them",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (("kl.loss.max_ratio=2.0",), "kl.loss.max_ratio: got 2.0, but there is no ratio"),
        (("kl.loss.importance_level=geometric",), "kl.loss.importance_level: got geometric, but the term has no"),
        (
            ("kl.loss={importance_corrected: true, importance_level: sequence}",),
            "kl.loss.importance_level: got sequence, but the gradient k2 has the ratio of the token",
        ),
        (
            ("kl.loss={importance_corrected: true, importance_level: sequence, gradient: value, max_ratio: 2}",),
            "kl.loss.importance_level: got sequence, but kl.loss.max_ratio caps the ratio of a token",
        ),
        (
            ("kl.loss={estimator: exact, gradient: k2}",),
            "kl.loss.gradient: got k2, but kl.loss.estimator exact is diff",
        ),
        (
            ("kl.loss={estimator: exact, importance_corrected: true}",),
            "kl.loss.importance_corrected: got true, but kl.loss.estimator exact is no mean",
        ),
        (
            ("kl.loss={estimator: exact, value_clip: 10}",),
            "kl.loss.value_clip: got 10.0, but kl.loss.estimator exact has no outliers",
        ),
        (
            ("kl.reward={estimator: exact, value_clip: 10}",),
            "kl.reward.value_clip: got 10.0, but kl.reward.estimator exact has no outliers",
        ),
        (("checkpoint={every: 20, keep_every: 30}",), "checkpoint.keep_every: got 30, expected a multiple of"),
        (("kl.reward.controller={type: adaptive, target: 1, horizon: 9}",), "kl.reward.coef: got 0 with the adaptive"),
        (
            ("advantage=gae", "loss.value_coef=1", "advantage.empty_rows=drop"),
            "advantage.empty_rows: got drop, but adv",
        ),
        (
            ("advantage.zeros=drop", "loss.rejected_tokens=count", "correction={type: veto_mask}"),
            "advantage.zeros: got drop, which takes tokens out of the denominators, but loss.rejected_tokens is count",
        ),
        (
            (
                "loss.entropy_coef=0.1",
                "loss.entropy_controller={type: adaptive, target: 1, delta: 0.1, max_coef: 0.05}",
            ),
            "loss.entropy_coef: got 0.1, but the bounds of its controller are 0 to 0.05",
        ),
        (
            ("loss.entropy_controller={type: adaptive, delta: 0.1}",),
            "loss.entropy_controller.target: missing, expected a number >= 0",
        ),
        (
            ("loss.entropy_aggregation=token_mean",),
            "loss.entropy_aggregation: got token_mean, but loss.entropy_coef is 0, so there is no entropy bonus",
        ),
        (("loss.entropy_controller.target=1",), "loss.entropy_controller.target: not a field when"),
        (("reference={source: bema, lag: 0}",), "reference.lag: got 0, expected a number > 0"),
        (("reference={source: bema, decay: 0.9}",), "reference.decay: not a field when reference.source is bema"),
        (("advantage.balance=0.25",), "advantage.balance: got 0.25, which acts before the division by the mean size"),
        (("advantage.balance=-1.5",), "advantage.balance: got -1.5, expected a number >= -1 and <= 1"),
        (("advantage.type=gae",), "loss.value_coef: got 0, but advantage.type gae learns a value head"),
        (("loss.value_coef=0.5",), "loss.value_coef: got 0.5, but advantage.type grpo has no value head"),
        (("loss.value_clip=0.2",), "loss.value_clip: got 0.2, but advantage.type grpo has no value head"),
        (
            ("loss.dual_clip=3.0", "loss.type=sapo"),
            "loss.dual_clip: not a field when loss.type is sapo; change loss.type (ppo, gspo, clip_cov), or",
        ),
        (("loss.max_length=8",), "loss.max_length: got 8, but loss.aggregation token_mean does not use it"),
        (("data.train=a.jsonl",), "data.train: got 'a.jsonl', but task arithmetic makes its own problems"),
        (("data.max_operand=9",), "eval.prompts: got 256, expected at most 50, half of the 100 problems"),
        (("reference={source: adapter, path: /}",), "reference.source: got adapter, but the model has none"),
        (("reference={source: step, step: 6}",), "reference.step: got 6, but the run ends at steps 5"),
        (("reference={source: checkpoint, path: /no/where}",), "reference.path: got '/no/where', expected a saved"),
        (("warm_start.checkpoint=/no/where",), "warm_start.checkpoint: got '/no/where', expected a saved"),
        (("model.kv_heads=3",), "model.heads: got 4, expected a multiple of model.kv_heads = 3"),
        (("mesh.slices=2", "mesh.data=1"), "mesh.slices: got 2, expected a divisor of mesh.data = 1"),
        (("mesh.tensor=4",), "model.kv_heads: got 2, expected a multiple of mesh.tensor = 4"),
        (("mesh.tensor=2", "model.mlp_width=5"), "model.mlp_width: got 5, expected a multiple of mesh.tensor = 2"),
        (
            ("mesh.tensor=16", "model.heads=16", "model.kv_heads=16"),
            "mesh.tensor: got 16, expected a divisor of the vocabulary of 264",
        ),
        (("mesh.fsdp=2", "model.width=33"), "model.width: got 33, expected a multiple of mesh.fsdp = 2"),
        (
            ("mesh.expert=4", "model.experts={count: 6, width: 8}"),
            "model.experts.count: got 6, expected a multiple of mesh.expert = 4",
        ),
        (
            ("mesh={fsdp: 2, expert: 4}", EXPERTS, "model.width=36"),
            "model.width: got 36, expected a multiple of mesh.fsdp x mesh.expert = 8",
        ),
        (
            ("mesh.tensor=2", "model.experts={count: 8, width: 7}"),
            "model.experts.width: got 7, expected a multiple of mesh.tensor = 2",
        ),
        (
            ("mesh.expert=4",),
            "model.experts: got null, but mesh.expert = 4 splits experts; set mesh.fsdp or mesh.data instead",
        ),
        (
            ("mesh={data: 2, expert: 4}", EXPERTS, "eval.batch_size=4"),
            "eval.batch_size: got 4, expected a multiple of mesh.data x mesh.fsdp x mesh.expert = 8",
        ),
        *SAMPLING_MESHES,
        (
            ("mesh.data=2", "eval.batch_size=3"),
            "eval.batch_size: got 3, expected a multiple of mesh.data x mesh.fsdp = 2",
        ),
        (
            ("mesh.data=2", "warm_start.batch_size=3"),
            "warm_start.batch_size: got 3, expected a multiple of mesh.data x mesh.fsdp = 2",
        ),
        (
            ("optim.updates_per_batch=3",),
            "optim.micro_batches: rollout.prompts_per_step x rollout.samples_per_prompt = 128 rows do not divide into",
        ),
        (
            ("optim.updates_per_batch=4", "optim.micro_batches=16", "mesh.fsdp=2", "mesh.data=2"),
            "optim.micro_batches: a micro-batch has 2 rows",
        ),
    ],
)
def test_combination_is_refused(overrides, start):
    (problem,) = problems(*overrides)
    assert problem.startswith(start)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_group_estimators_need_a_group(estimator):
    (problem,) = problems(f"advantage.type={estimator}", "rollout.samples_per_prompt=1")
    assert problem.startswith("rollout.samples_per_prompt: got 1")


def test_other_estimators_need_no_group():
    build("advantage.type=reinforce_plus_plus", "rollout.samples_per_prompt=1")


@pytest.mark.parametrize(
    "overrides",
    [
        GAE,
        (*GAE, "loss.value_clip=0.2"),
        ("loss.dual_clip=3.0",),
        (NORM, "loss.max_length=6"),
        ("kl.loss.aggregation=seq_mean_token_sum_norm", "loss.max_length=6"),
        ("loss.entropy_aggregation=seq_mean_token_sum_norm", "loss.entropy_coef=0.1", "loss.max_length=6"),
        ("lora.rank=2", "reference={source: adapter, path: /}"),
        ("reference={source: checkpoint, path: /}",),
        ("mesh={data: 2, fsdp: 2, tensor: 2}",),
        ("kl.loss={coef: 0.1, estimator: exact}", "kl.reward={coef: 0.1, estimator: exact}"),
        ("log_probs.tile={tokens: 512, vocab: 4096}",),
        ("kl.reward={coef: 0.1, controller: {type: adaptive, target: 1, horizon: 9}}",),
    ],
)
def test_combination_is_accepted(overrides):
    _, warnings = build(*overrides)
    assert warnings == ()


def test_files_of_the_real_task_must_exist(tmp_path):
    actual = problems("task=gsm8k", f"data.train={tmp_path}", f"data.eval={tmp_path / 'none'}")
    assert [problem.rpartition("but ")[2] for problem in actual] == ["it is a directory", "there is no such file"]


def test_problems_caused_by_a_bad_field_are_omitted():
    actual = problems("mesh.tensor=0", "model.mlp_width=5", "task=gsm", "data.train=a.jsonl")
    assert [problem.partition(":")[0] for problem in actual] == ["task", "mesh.tensor"]


def test_rollout_kl_switches_the_recording_on():
    config, warnings = build("kl.rollout.coef=0.1", "rollout.record_log_probs=false")
    assert config.rollout.record_log_probs
    (warning,) = warnings
    assert warning.startswith("rollout.record_log_probs: switched on")
    config, warnings = build("rollout.record_log_probs=false")
    assert not config.rollout.record_log_probs
    assert warnings == ()


@pytest.mark.parametrize("term", ["reward", "loss", "advantage"])
def test_warns_of_a_term_fixed_at_zero(term):
    _, (warning,) = build(f"kl.{term}={{coef: 0.5, estimator: none}}")
    assert warning == f"kl.{term}.estimator: none makes this term 0 although kl.{term}.coef is 0.5"


def test_update_measures_one_direction_of_exact_kl():
    forward = "kl.loss={coef: 0.1, estimator: exact, direction: forward}"
    (problem,) = problems(forward, "reference.monitor=exact")
    assert problem.startswith("reference.monitor: got exact, but kl.loss.direction forward")
    build(forward, "reference.monitor=true")


def test_warns_of_exact_kl_in_the_reward_alone():
    _, (warning,) = build("kl.reward={coef: 0.5, estimator: exact}", "kl.loss={coef: 0.5, estimator: k3}")
    assert warning.startswith("kl.reward.estimator: exact charges a token for the KL at later prefixes alone")


def test_warns_of_a_loss_training_nothing():
    _, (warning,) = build("kl.loss={coef: 0.5, gradient: none}")
    assert warning.startswith("kl.loss.gradient: none")


def test_advantage_that_reads_rollout_log_probs_is_named(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def advantage(rollout_log_probs, mask): return rollout_log_probs\n")
    _, (warning, *_) = build(f"advantage={path}:advantage", "rollout.record_log_probs=false")
    assert warning.startswith("rollout.record_log_probs: switched on, because advantage.type custom needs")


def test_dataset_without_a_name_is_refused_with_the_forms():
    (problem, *_) = problems("task=jsonl", "data={train: 'datasets:', eval: 'datasets:a'}")
    assert problem == "data.train: got 'datasets:', expected datasets:NAME, :SPLIT or :CONFIG:SPLIT after it"


FROM_ZERO = "controller: {type: pi, target: 0.1, kp: 0.1, ki: 0.1}"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            (f"kl.loss={{estimator: k1, gradient: value, {FROM_ZERO}}}",),
            "kl.loss.estimator: got k1 with kl.loss.gradient value",
        ),
        (
            ("loss=none", f"kl={{loss: {{coef: 1}}, reward: {{{FROM_ZERO}}}}}"),
            "kl.reward.controller: got pi, which enters the loss by way of the advantages, but loss.type none",
        ),
    ],
)
def test_term_from_zero_is_refused_as_another(overrides, start):
    (problem,) = problems(*overrides)
    assert problem.startswith(start)


def test_term_from_zero_is_trained_on():
    build("loss=none", f"kl.loss={{{FROM_ZERO}}}")
    build("loss={type: gpg, old_log_probs: sampler}", f"kl.loss={{importance_corrected: true, {FROM_ZERO}}}")


def test_warns_of_a_term_from_zero():
    _, (warning,) = build(f"kl.reward={{estimator: none, {FROM_ZERO}}}")
    assert warning == "kl.reward.estimator: none makes this term 0 although kl.reward.controller is pi"
    _, (warning,) = build(f"kl.loss={{gradient: none, {FROM_ZERO}}}")
    assert warning.startswith("kl.loss.gradient: none")


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("seed=1", False),
        ("kl.rollout.coef=0.1", False),
        ("kl.reward.coef=0.1", True),
        ("kl.loss.coef=0.1", True),
        ("kl.advantage.coef=0.1", True),
        ("reference.monitor=true", True),
        ("reference.monitor=exact", True),
    ],
)
def test_reference_is_needed_only_by_its_readers(override, needed):
    assert Plan.of(build(override)[0]).reference is needed


def test_exact_kl_has_its_exact_gradient():
    config, _ = build("kl.loss={coef: 0.1, estimator: exact}")
    assert config.kl.loss.gradient == "value"
    assert parse(yaml.safe_load(dump_yaml(config)))[0] == config
    # From the command line, over a file that says k3.
    assert build("kl.loss={coef: 0.1, estimator: k3}", "kl.loss.estimator=exact")[0].kl.loss.gradient == "value"
    (problem,) = problems("kl.advantage.estimator=exact")
    assert problem.startswith("kl.advantage.estimator: got 'exact', expected one of none, k1")


@pytest.mark.parametrize(
    ("overrides", "loss", "reward"),
    [
        (("kl.loss.estimator=exact", "kl.reward.estimator=exact"), False, False),
        (("kl.loss={coef: 0.1, estimator: exact}",), True, False),
        (("kl.reward={coef: 0.1, estimator: exact}", "kl.loss.coef=0.1"), False, True),
    ],
)
def test_exact_kl_is_computed_where_it_has_coefficients(overrides, loss, reward):
    config, _ = build(*overrides)
    plan = Plan.of(config)
    assert (plan.exact_loss, plan.exact_reward) == (loss, reward)


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        ((), False),
        (("lora.rank=2",), True),
        (("lora.rank=2", "reference={source: step, step: 0}"), True),
        (("lora.rank=2", "reference={source: adapter, path: /}"), True),
        (("lora.rank=2", "reference={source: checkpoint, path: /}"), False),
    ],
)
def test_adapter_shares_its_head_with_the_base_reference(overrides, shared):
    assert Plan.of(build(*overrides)[0]).shares_head is shared


def test_derived_facts():
    config, _ = build(*GAE, "rollout.prompts_per_step=3", "rollout.samples_per_prompt=5", "kl.rollout.coef=0.1")
    assert config.rows_per_batch() == 15
    plan, default = Plan.of(config), Plan.of(build()[0])
    assert (plan.value_head, plan.rollout_log_probs) == (True, True)
    assert (default.value_head, default.rollout_log_probs) == (False, False)


SERVERS = "rollout.source={type: openai, model: m}"
OPENAI = "rollout.source={type: openai, url: 'http://host:1', model: m}"
FILE = "rollout.source={type: file, path: tests}"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ((OPENAI, "rollout.slots=4"), "rollout.slots: got 4, but rollout.source.type openai does not use it"),
        (
            (FILE, "rollout.top_k=3"),
            "rollout.top_k: got 3, but rollout.source.type file does not use it; leave it at 0",
        ),
        ((FILE, "rollout.stop=[a]"), "rollout.stop: got ['a'], but rollout.source.type file does not use it; leave it"),
        (("rollout.ahead=1",), "rollout.ahead: got 1, but rollout.source.type jax cannot sample while the"),
        ((FILE, "rollout.ahead=1"), "rollout.ahead: got 1, but rollout.source.type file has nothing in flight; leave"),
        ((OPENAI, "rollout.ahead=-1"), "rollout.ahead: got -1, expected an integer >= 0 and <= 1_000"),
        (
            (FILE, "eval={source: rollout, prompts: 8}", "task=arithmetic"),
            "eval.source: got rollout, but a recording",
        ),
        (
            (FILE, "correction={type: max_lag, max_lag: 1}"),
            "correction[0]: got max_lag, which reads the lag of each token",
        ),
        (
            (OPENAI, "rollout.source.sync=none", "correction={type: max_lag, max_lag: 1}"),
            "correction[0]: got max_lag, which reads the lag of each token, but with rollout.source.sync none",
        ),
        ((FILE, "rollout.policy_lag=1"), "rollout.policy_lag: got 1, but rollout.source.type file does not use it"),
        ((FILE, "rollout.record=x"), "rollout.record: got 'x', but rollout.source.type file does not use it; leave it"),
        (("rollout.source={type: file, path: no}",), "rollout.source.path: got 'no', but there is no such file"),
        (
            (FILE, "rollout.record_kept_tokens=true"),
            "rollout.record_kept_tokens: got True, but rollout.source.type file does not use it; leave it at false",
        ),
        (
            ("rollout.record_kept_tokens=true", "rollout.top_p=0.9"),
            "rollout.record_kept_tokens: got true, but rollout.top_k is 0, and it bounds the number of recorded "
            "tokens; set rollout.top_k",
        ),
        (
            ("rollout.record_kept_tokens=true", "rollout.top_k=5", "advantage.type=otb"),
            "rollout.record_kept_tokens: got true, but the advantage estimator reads the squared probabilities",
        ),
        (("rollout.slots=3", "mesh.data=2"), "rollout.slots: got 3, expected a multiple of mesh.data x mesh.fsdp = 2"),
        ((OPENAI, "rollout.source.sync=lora"), "rollout.source.sync: got lora, but there is no lora section"),
        (
            (OPENAI, "rollout.source.sync=none", "rollout.source.folder=x"),
            "rollout.source.folder: got 'x', but rollout.source.sync none writes nothing",
        ),
        (
            (OPENAI, "rollout.source.api_key_env=A", "rollout.source.api_key_file=b"),
            "rollout.source.api_key_file: got 'b', but rollout.source.api_key_env is set too; set only one of them",
        ),
        (
            (OPENAI, "rollout.source.url='http://user:secret@host'"),
            "rollout.source.url: got 'http://***@host', but it has a user name or password, which logs would show",
        ),
        (
            (OPENAI, "rollout.source.url='http://host/v1?api_key=sk-secret'"),
            "rollout.source.url: got 'http://host/v1?***', but it has a query, a fragment or a backslash",
        ),
        (
            (OPENAI, "rollout.source.url='http://host/v1#sk-secret'"),
            "rollout.source.url: got 'http://host/v1#***', but it has a query, a fragment or a backslash",
        ),
        (("model.experts={count: 40000, width: 8}",), "model.experts.count: got 40000, expected"),
        (("routing.bias_update_rate=1e38",), "routing.bias_update_rate: got 1e+38, expected"),
        (
            ("rollout.source={type: openai, url: 'host:1', model: m}",),
            "rollout.source.url: got 'host:1', expected text that starts with http:// or https://",
        ),
        ((SERVERS,), "rollout.source.url: missing; set it to the address of the server, or list several in"),
        (
            (OPENAI, "rollout.source.urls=[http://a]"),
            "rollout.source.urls: got a list, but rollout.source.url is set too; set only one of them",
        ),
        (
            (SERVERS, "rollout.source.urls=[http://a, http://b, http://a/]"),
            "rollout.source.urls: got http://a twice; list each server once",
        ),
        (
            (SERVERS, "rollout.source.urls=[http://a, 'http://u:secret@b']"),
            "rollout.source.urls: got 'http://***@b', but it has a user name or password",
        ),
        (
            (OPENAI, "rollout.source.router=http://r"),
            "rollout.source.router: needs rollout.source.urls, the servers behind it, to which weights are sent",
        ),
        (
            (SERVERS, "rollout.source.urls=[http://a]", "rollout.source.router=http://a/"),
            "rollout.source.router: is one of rollout.source.urls; set it to the address in front of them",
        ),
        (
            (OPENAI, "rollout.source.on_engine_failure=drop"),
            "rollout.source.on_engine_failure: got drop, but there is one server; list several",
        ),
        (
            (OPENAI, "rollout.source.sync=adapter"),
            "rollout.source.sync: got 'adapter', expected one of lora, weights, none, or module:function",
        ),
        (
            (OPENAI, "rollout.source.sync=no.module:bridge"),
            "rollout.source.sync: got 'no.module:bridge', but",
        ),
        (
            (OPENAI, "rollout.source.sync=tests.train.rollouts.test_engines:bridge", "rollout.source.folder=x"),
            "rollout.source.folder: got 'x', but rollout.source.sync tests.train.rollouts.test_engines:bridge writes",
        ),
    ],
)
def test_ignored_or_missing_source_fields_are_problems(overrides, start):
    (problem,) = problems(*overrides)
    assert problem.startswith(start), problem


def test_sources_of_completions_accept_their_fields():
    build(OPENAI, "rollout.top_p=0.9", "rollout.stop=['a', 'b']", "rollout.record=x", "rollout.policy_lag=2")
    build(OPENAI, "rollout.top_p=0.9", "temperature=0.7", "rollout.record_log_probs=false")
    build(FILE, "rollout.source.shuffle=false", "temperature=0.7")
    build("rollout.slots=4", "rollout.top_k=5", "rollout.min_p=0.1", "mesh.data=2")
    build("rollout.record_kept_tokens=true", "rollout.top_k=5", "rollout.top_p=0.9")


@pytest.mark.parametrize("override", ["optim.learning_rate=1e39", "kl.loss.coef=1e308", "kl.reward.value_clip=4e38"])
def test_number_beyond_float32_is_refused(override):
    (problem,) = problems(override, *(("kl.reward.coef=0.1",) if "reward" in override else ()))
    path, _, value = override.partition("=")
    assert problem.startswith(f"{path}: got {value.replace('e', 'e+')} (infinite in float32), expected a number")

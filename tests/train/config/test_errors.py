"""Mistakes in a config: each is named with its path, its value and what is allowed, and all of them at once."""

import pytest

from tests.train.config.built import problems_of_file


def test_every_problem_is_reported_at_once(write):
    path = write(
        "stepz: 5\nseed: 1.0\nseed: 3\nname: a/b\ntemperature: .inf\ntask: gsm8k\n"
        "kl: {lss: {}, loss: {coef: 1e-3, estimator: k4}, reward: {controller: {type: adaptive, target: 0}}}\n"
        "lora: {targets: [q_proj, qproj]}\nmesh: {1: 2, tensor: 3}\ncheckpoint: 3\n"
    )
    problems = problems_of_file(path, "kl.los.coef=1", "foo", "optim.optimizer.eps=[", "optim.micro_batches=7")
    starts = [problem.partition(": ")[0] for problem in problems]
    assert starts == [
        "seed",
        "kl.los.coef",
        "'foo'",
        "optim.optimizer.eps",
        "name",
        "steps",
        "temperature",
        "lora.targets[1]",
        "mesh[1]",
        "kl.reward.controller.target",
        "kl.reward.controller.horizon",
        "kl.loss.estimator",
        "kl.lss",
        "checkpoint",
        "stepz",
        "data.train",
        "data.eval",
        "optim.micro_batches",
        "model.heads",
        "model.kv_heads",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "kl.loss.estimator=k4",
            "kl.loss.estimator: got 'k4', expected one of none, k1, abs, k2, k3, low_var_kl, exact; did you mean 'k3'?",
        ),
        (
            "kl.rollout.estimator=low_var_kl",
            "kl.rollout.estimator: got 'low_var_kl', expected one of k1, abs, k2, k3",
        ),
        (
            "kl.rollout={coef: 1, estimater: k2}",
            "kl.rollout.estimater: unknown field, expected one of coef, estimator, "
            "gradient, log_ratio_clip, value_clip; did you mean 'kl.rollout.estimator'?",
        ),
        (
            "kl.los.coef=1",
            "kl.los.coef: unknown field, expected one of reward, loss, advantage, rollout; "
            "did you mean 'kl.loss.coef'?",
        ),
        ("steps.x=1", "steps.x: unknown field, steps is an integer >= 1 and <= 1_000_000_000; did you mean 'steps'?"),
        ("steps=true", "steps: got true, expected an integer >= 1 and <= 1_000_000_000"),
        ("steps='3'", "steps: got '3', expected an integer >= 1 and <= 1_000_000_000"),
        ("steps=", "steps: got null, expected an integer >= 1 and <= 1_000_000_000"),
        ("temperature=0", "temperature: got 0, expected a number > 0"),
        ("temperature=.nan", "temperature: got nan, expected a finite number > 0"),
        ("optim.optimizer.b2=1.0", "optim.optimizer.b2: got 1.0, expected a number >= 0 and < 1"),
        ("loss.dual_clip=1", "loss.dual_clip: got 1, expected a number > 1 or null"),
        (
            "model.head_dim=3",
            "model.head_dim: got 3, expected an integer >= 2 and <= 1_000_000 and a multiple of 2",
        ),
        ("model.qk_norm=yes", "model.qk_norm: got 'yes', expected true or false"),
        ("compile_cache=7", "compile_cache: got 7 (no directory), expected true, false or a path of the file system"),
        (
            "output=7",
            "output: got 7, expected a path of the file system, or an address of s3:// or gs:// (quote it: '7')",
        ),
        ("kl=3", "kl: got 3, expected a mapping with reward, loss, advantage, rollout"),
        ("lora=3", "lora: got 3, expected a mapping with rank, alpha, rslora, targets, path or null"),
        ("mesh=", "mesh: got null, expected a mapping with data, fsdp, expert, context, tensor, slices, slice_axis"),
        (
            "rewards.weights={correct: yes}",
            "rewards.weights: got {'correct': 'yes'} (the entry 'correct': 'yes'), expected a mapping of names of "
            "rewards to numbers or null",
        ),
        (
            "data.template_arguments={a: [1]}",
            "data.template_arguments: got {'a': [1]} (the entry 'a': [1]), expected a mapping of text to plain values",
        ),
        (
            "lora.targets=[k_proj, k_proj]",
            "lora.targets: got ['k_proj', 'k_proj'] (an entry is repeated), expected a list, without repeats, of "
            "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, gate",
        ),
        (
            "lora.targets=[k_proj, k_prjo]",
            "lora.targets[1]: got 'k_prjo', expected one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
            "down_proj, gate; did you mean 'k_proj'?",
        ),
        (
            "reference.source=stp",
            "reference.source: got 'stp', expected one of base, step, adapter, checkpoint, ema, bema; "
            "did you mean 'step'?",
        ),
        ("reference.source=step", "reference.step: missing, expected an integer >= 0 and <= 1_000_000_000"),
        ("reference={source: step, step: -1}", "reference.step: got -1, expected an integer >= 0 and <= 1_000_000_000"),
        (
            "reference.step=1",
            "reference.step: not a field when reference.source is base; change reference.source (step), or replace "
            "the section with reference={source: base}",
        ),
        (
            "kl.reward.controller.type=[adaptive]",
            "kl.reward.controller.type: got ['adaptive'], expected one of fixed, adaptive, pi, scheduled",
        ),
        ("seed={a: 1, a: 2}", "seed: in '{a: 1, a: 2}', a: given twice, on lines 1 and 1"),
        ("seed", "'seed': got no '=', expected an override of the form key=value"),
    ],
)
def test_message_of_a_bad_value(write, override, problem):
    assert problem in problems_of_file(write(), override)


def test_name_in_the_wrong_section_is_found(write):
    (problem,) = problems_of_file(write("steps: 1\nlearning_rate: 1\n"))
    assert problem == "learning_rate: unknown field; did you mean 'optim.learning_rate'?"


LENGTHS = "loss.max_length' or 'data.max_prompt_length' or 'data.max_completion_length"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        # By the letters.
        ("stepz", "steps"),
        ("optim.lerning_rate", "optim.learning_rate"),
        ("kl.los.coef", "kl.loss.coef"),
        ("rollout.sorce.url", "rollout.source.url"),
        ("eval.batchsize", "eval.batch_size"),
        ("optim.eps", "optim.optimizer.eps"),
        # By the words.
        ("operand", "data.max_operand"),
        ("optim.warmup", "optim.warmup_steps"),
        ("reference.update_every", "reference.every"),
        ("data.max_length", LENGTHS),
        # The same name elsewhere.
        ("top_p", "rollout.top_p"),
        ("rollout.seed", "seed"),
        ("model.tokenizer", "data.tokenizer"),
        # Usual names, also in a section.
        ("rollout.temperature", "temperature"),
        ("rollout.max_tokens", "data.max_completion_length"),
        ("optim.lr", "optim.learning_rate"),
        ("warm_start.lr", "warm_start.learning_rate"),
        ("optim.gradient_accumulation_steps", "optim.micro_batches"),
        ("actor_rollout_ref.actor.kl_loss_coef", "kl.loss.coef"),
        ("scale_rewards", "advantage.scale"),
        ("optim.epsilon", "optim.optimizer.eps"),
        # Nothing is near: no hint is better than a wrong one.
        ("rollout.repetition_penalty", None),
        ("rollout.presence_penalty", None),
        ("mask_truncated_completions", None),
        ("num_train_epochs", None),
        ("logging_steps", None),
        ("vllm_mode", None),
        ("optim.steps", None),
        ("kl.type", None),
        ("mesh.dp", None),
        ("lora.dropout", None),
    ],
)
def test_unknown_field_has_a_near_hint_or_none(write, path, field):
    (problem,) = problems_of_file(write(), f"{path}=1")
    assert problem.startswith(f"{path}: unknown field")
    assert problem.endswith(f"; did you mean '{field}'?" if field else problem)
    assert ("did you mean" in problem) == (field is not None)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("loss.type=grpo", "ppo"),
        ("loss.type=gspo_token", "gspo"),
        ("loss.type=dpo", None),
        ("loss.type=rloo", None),
        ("rollout.source.type=vllm", "openai"),
        ("optim.optimizer.type=paged_adamw", "adamw"),
        ("optim.optimizer.type=lamb", None),
        ("optim.schedule.type=cosine_with_restarts", "cosine"),
        ("optim.schedule.type=inverse_sqrt", None),
        ("loss.aggregation=dapo", "token_mean"),
        ("model.dtype=float64", "float32"),
        ("model.dtype=bf16", "bfloat16"),
        ("model.dtype=fp16", None),
        ("model.attention=flash", None),
        ("kl.loss.estimator=mse", "k2"),
    ],
)
def test_unknown_value_has_a_near_hint_or_none(write, override, hint):
    path, _, value = override.partition("=")
    problem = next(line for line in problems_of_file(write(), override) if line.startswith(f"{path}: got '{value}'"))
    assert ("did you mean" in problem) == (hint is not None)
    assert hint is None or problem.endswith(f"; did you mean '{hint}'?")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "got nothing, expected a mapping of fields such as `steps: 100`"),
        ("- 1\n", "got [1], expected a mapping of fields such as `steps: 100`"),
        ("steps", "got 'steps', expected a mapping of fields such as `steps: 100`"),
        ("steps: [1\n", "not valid YAML: expected ',' or ']', but got '<stream end>' on line 2, column 1"),
        ("a: 1\n---\nb: 1\n", "not valid YAML: but found another document on line 2, column 1"),
        (
            "a: !!python/object:os.system {}\n",
            "not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system' on line 1, column 4",
        ),
        ("a: " + "[" * 5000, "not valid YAML: it is nested too deeply"),
        ("a: \x07\n", "not valid YAML: unacceptable character #x0007: special characters are not allowed in"),
    ],
)
def test_malformed_config_files_are_refused(write, text, problem):
    (actual,) = problems_of_file(write(text))
    assert actual.startswith(problem)


def test_unreadable_files_are_refused(tmp_path, write):
    assert problems_of_file(tmp_path / "none.yaml") == ("no file or recipe of this name",)
    assert problems_of_file(tmp_path / "quickstrat") == ("no file or recipe of this name; did you mean 'quickstart'?",)
    assert problems_of_file(tmp_path) == ("cannot read the config: Is a directory",)
    path = write()
    path.write_bytes(b"steps: \xff\n")
    assert problems_of_file(path) == ("not a text file: invalid start byte at byte 7",)


def test_repeated_keys_are_found_at_every_depth(write):
    problems = problems_of_file(write("steps: 1\nkl:\n  loss: {coef: 1.0, coef: 2.0}\n  loss: {}\nsteps: 2\n"))
    assert problems == (
        "kl.loss.coef: given twice, on lines 3 and 3",
        "kl.loss: given twice, on lines 3 and 4",
        "steps: given twice, on lines 1 and 5",
    )


def test_recursive_alias_is_an_error_not_a_loop(write):
    problems = problems_of_file(write("steps: 1\nkl: &a {loss: *a}\n"))
    assert any(problem.startswith("kl.loss") for problem in problems)

"""Loading a config: what is accepted, what is reported, and that all of it is reported at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.config.built import problems_of_file
from train.config.fields import known_fields, variant_fields
from train.config.load import dump_yaml, load, parse
from train.config.plan import Plan
from train.config.schema import Config
from train.config.types import Section
from train.config.yaml_text import format_yaml, parse_yaml
from train.data.prompts import encode_prompts, keep_prompts, keep_solutions
from train.data.tasks import load_task
from train.data.tokenizers import ByteTokenizer

ROOT = Path(__file__).parents[3]
# Recipes of models that are downloaded first, and of episodes of one, are loaded and run in
# tests/integration/test_recipes.py; those of recorded completions and of other episodes in
# tests/integration/test_shipped_configs.py.
OF_MODELS = {"gsm8k_qwen3_0_6b_lora", "gsm8k_qwen3_8b_v5p64", "math_llama3_8b_h100x8", "distill_qwen3"}
ELSEWHERE = {*OF_MODELS, "replay", "calculator", "calculator_agent", "guessing", "real_agent", "sqlite"}
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem not in ELSEWHERE)


@pytest.fixture
def gsm8k(tmp_path):
    """Overrides that point to small data files."""
    line = '{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n'
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(line)
    return ["task=gsm8k", f"data.train={tmp_path / 'train.jsonl'}", f"data.eval={tmp_path / 'eval.jsonl'}"]


def test_there_are_configs():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {
        *ELSEWHERE,
        "gsm8k",
        "lora",
        "moe",
        "ppo_adaptive_kl",
        "quickstart",
        "real",
        "reinforce_pp_baseline_centered",
        "smoke",
        "word_problems",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_on_the_real_data_task(path, gsm8k):
    config = load(path, gsm8k).config
    assert config.task == "gsm8k"
    expected = {"real": (80, 40), "word_problems": (256, 24)}.get(path.stem, (256, 192))
    assert (config.data.max_prompt_length, config.data.max_completion_length) == expected


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_without_warnings_under_its_name(path, gsm8k):
    loaded = load(path, gsm8k if path.stem == "gsm8k" else [])
    assert loaded.warnings == ()
    assert loaded.source == path
    assert loaded.config.name == path.stem


def test_gsm8k_config_names_the_paths_it_lacks():
    assert problems_of_file(ROOT / "configs/gsm8k.yaml") == (
        "data.train: missing; task gsm8k needs a file of JSON lines: data.train=PATH",
        "data.eval: missing; task gsm8k needs a file of JSON lines: data.eval=PATH",
    )


def test_shipped_configs_match_their_descriptions():
    quickstart = load(ROOT / "configs/quickstart.yaml").config
    assert quickstart.advantage.type == "grpo"
    assert (quickstart.kl.loss.estimator, quickstart.kl.loss.gradient) == ("exact", "value")
    assert quickstart.kl.loss.coef > 0
    assert quickstart.kl.rollout.coef > 0
    ppo = load(ROOT / "configs/ppo_adaptive_kl.yaml").config
    assert Plan.of(ppo).value_head
    assert ppo.kl.reward.coef > 0
    assert ppo.kl.reward.controller.type == "adaptive"
    centered = load(ROOT / "configs/reinforce_pp_baseline_centered.yaml").config
    assert centered.advantage.type == "reinforce_plus_plus_baseline"
    assert centered.kl.advantage.coef > 0
    assert (centered.reference.source, centered.reference.step) == ("step", 0)
    lora = load(ROOT / "configs/lora.yaml").config
    assert lora.lora is not None
    assert lora.reference.source == "base"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dumped_config_loads_back_equal(path, gsm8k, write):
    config = load(path, gsm8k if path.stem == "gsm8k" else []).config
    assert load(write(dump_yaml(config))).config == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2.5e-4", -2.5e-4),
        (".5", 0.5),
        ("3.", 3.0),
        ("+7", 7),
        ("1_000", 1000),
        ("010", "010"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("none", "none"),
        ("e3", "e3"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("~", None),
        ("", None),
        ("true", True),
    ],
)
def test_yaml_scalars(text, value):
    assert parse_yaml(f"x: {text}\n") == ({"x": value}, [])
    assert type(parse_yaml(f"x: {text}\n")[0]["x"]) is type(value)


_TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["C"]))
    | st.sampled_from(["1e-3", "010", "null", "~", "true", "+", "-", "1_0", ".inf", "1.", "no", "=", "<<"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(_TREES)
def test_written_yaml_reads_back_equal(tree):
    assert parse_yaml(format_yaml(tree)) == (tree, [])


def test_defaults_then_file_then_overrides(write):
    path = write("steps: 3\noptim: {learning_rate: 1e-3}\nseed: 4\n")
    config = load(
        path, ["seed=5", "optim.optimizer.b1=8e-1", "seed=6", "lora.rank=4", "kl.loss={coef: 1e-2, estimator: k2}"]
    ).config
    assert config.optim.learning_rate == 1e-3
    assert config.optim.optimizer.b1 == 0.8
    assert config.optim.optimizer.b2 == Config(steps=1).optim.optimizer.b2
    assert config.seed == 6
    assert config.lora is not None
    assert config.lora.rank == 4
    assert (config.kl.loss.coef, config.kl.loss.estimator) == (0.01, "k2")


def test_section_of_variants_can_be_changed_in_part(write):
    assert load(write(), ["reference.monitor=true"]).config.reference.source == "base"
    assert load(write(), ["reference.source=step", "reference.step=0"]).config.reference.step == 0


@pytest.mark.parametrize(
    ("override", "dropped"),
    [
        ("rollout={prompts_per_step: 4}", "rollout: drops rollout.samples_per_prompt of the file"),
        ("kl.loss={coef: 0.1}", "kl.loss: drops kl.loss.estimator of the file"),
        ("rollout.prompts_per_step=4", None),
        ("loss={type: cispo}", None),  # another variant
        ("eval=null", None),
    ],
)
def test_section_names_the_fields_it_drops(override, dropped):
    notes = [note for note in load("guessing", [override]).warnings if " of the file" in note]
    assert len(notes) == (dropped is not None)
    assert all(note.startswith(str(dropped)) for note in notes)


def test_entry_of_a_mapping_changes_alone():
    loaded = load("guessing", ["data.arguments.wrong=0.25", "rewards.weights.a.b=0.5"])
    assert loaded.config.data.arguments == {"most": 14, "turns": 4, "problems": 4096, "held_out": 960, "wrong": 0.25}
    assert loaded.config.rewards.weights == {"a.b": 0.5}
    assert loaded.origins["data.arguments"] == "command line"
    assert loaded.origins["environment.arguments"] == "file"


@pytest.mark.parametrize("path", ["data.arguments.", "correction.arguments.bound", "data.argument.highest"])
def test_entry_of_no_mapping_is_refused(write, path):
    assert any(line.startswith(f"{path}: ") for line in problems_of_file(write("steps: 5\n"), f"{path}=1"))


def test_config_is_frozen():
    config = Config(steps=1)
    with pytest.raises(ValueError, match="frozen"):
        config.kl.loss.coef = 1.0
    assert hash(config) == hash(Config(steps=1))


def test_every_field_is_documented_with_its_default():
    config = parse({"steps": 1, "lora": {}})[0].model_dump()

    def lookup(path: str):
        """The value at a path of the default config, or nothing where a section is null or another variant."""
        value = config
        for part in path.split("."):
            if value is None or part not in value:
                return None
            value = value[part]
        return (value,)

    for path, known in known_fields().items():
        assert known.doc, path
        assert known.expected, path
        if not known.section and not known.required and lookup(path) is not None:
            assert lookup(path) == (known.default,), path


def test_every_variant_has_the_defaults_of_its_own():
    fields = variant_fields()
    assert (fields["loss.clip_high", "ppo"].default, fields["loss.clip_high", "cispo"].default) == (0.2, 4.0)
    assert fields["optim.optimizer.b2", "lion"].default == 0.99
    variants = {
        "loss": ("sapo", {"type": "sapo"}),
        "rollout.source": ("openai", {"type": "openai", "url": "http://host", "model": "m"}),
        "reference": ("ema", {"source": "ema"}),
    }
    for section, (variant, raw) in variants.items():
        nested = raw
        for part in reversed(section.split(".")):
            nested = {part: nested}
        dumped = parse({"steps": 1, **nested})[0].model_dump()
        for part in section.split("."):
            dumped = dumped[part]
        for name, value in dumped.items():
            known = fields[f"{section}.{name}", variant]
            default = known.default.model_dump() if isinstance(known.default, Section) else known.default
            assert name in raw or default == value, name


def test_every_number_has_a_range():
    for path, known in (*known_fields().items(), *variant_fields().items()):
        if known.expected.startswith(("a number", "an integer")):
            assert ">" in known.expected, path


@pytest.mark.parametrize("operations", ["+", "+-"])
@pytest.mark.parametrize("max_operand", [9, 49, 100])
def test_default_lengths_fit_every_problem_and_every_solution(operations, max_operand):
    data = {"max_operand": max_operand, "operations": operations, "error_rate": 0.5}
    config, _ = parse({"steps": 1, "data": data, "eval": {"prompts": 20, "batch_size": 20}})
    task = load_task(config)
    examples, tokenizer = [*task.train, *task.eval], ByteTokenizer()
    prompt_length, completion_length = config.data.max_prompt_length, config.data.max_completion_length
    assert len(keep_prompts(examples, tokenizer, prompt_length)) == len(examples)
    assert len(keep_solutions(examples, tokenizer, completion_length)) == len(examples)
    with pytest.raises(ValueError, match="expected at most"):
        encode_prompts(examples, tokenizer, prompt_length - 1)

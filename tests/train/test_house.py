"""The rules of the trainer's house, checked: imports go one way, without a circle, and the compute core stays small."""

import ast
import functools
import pathlib

from train.rl.kl_metrics import KL_METRICS, largest_of

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "train").rglob("*.py"))
}
# A module imports from its own folder or one before it; the run context counts as one of the rollouts.
FOLDERS = (
    *(
        "config",
        "storage",
        "distributed",
        "process",
        "models",
        "sequences",
        "rl",
        "data",
        "weights",
        "references",
        "rollouts",
        "run",
        "plan",
    ),
    "report",
    "commands",
)
COMMANDS = ("train", "train.__main__", "train.eval", "train.export", "train.import", "train.serve", "train.real")


def folder_of(module: str) -> str:
    if module in COMMANDS:
        return "commands"
    return "rollouts" if module == "train.context" else module.split(".")[1]


@functools.cache
def imported(module: str, *, deferred: bool) -> set[str]:
    """The modules of the trainer that a module imports: at its top, or also within functions and type checks."""
    tree = ast.parse(MODULES[module].read_text())
    names: set[str] = set()
    for node in ast.walk(tree) if deferred else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & MODULES.keys()) or {node.module or ""}
    return (names & MODULES.keys()) - {module}


def reached(module: str) -> set[str]:
    """The modules that importing `module` loads, with the packages around them."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        waiting += [*imported(name, deferred=False), *(".".join(parts[:end]) for end in range(1, len(parts)))]
    return seen


def test_imports_go_one_way() -> None:
    for module in MODULES:
        for name in imported(module, deferred=True):
            assert FOLDERS.index(folder_of(name)) <= FOLDERS.index(folder_of(module)), f"{module} imports {name}"


def test_no_import_circle() -> None:
    for module in MODULES:
        seen, waiting = set(), list(imported(module, deferred=True))
        while waiting:
            name = waiting.pop()
            assert name != module, f"{module} imports itself by way of others"
            if name not in seen:
                seen.add(name)
                waiting += imported(name, deferred=True)


def test_compute_core_needs_config_distributed_and_models_alone() -> None:
    core = [name for name in MODULES if folder_of(name) == "rl"]
    assert core
    for module in core:
        folders = {folder_of(name) for name in reached(module) - {"train"}}
        assert folders <= {"config", "distributed", "models", "sequences", "rl"}


def test_compute_core_reads_the_config_in_makers_alone() -> None:
    """Makers take the plan, which has the config; the functions below them take the sections that they read."""
    host = ("coefficients", "update_rows")
    for module in (name for name in MODULES if folder_of(name) == "rl"):
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in host:
                types = [ast.unparse(x.annotation) for x in (*node.args.args, *node.args.kwonlyargs) if x.annotation]
                assert "Config" not in types, f"{module}.{node.name}"
                if not node.name.lstrip("_").startswith("make_"):
                    assert "plan.config" not in ast.unparse(node), f"{module}.{node.name}"


def test_plan_of_a_run_is_derived_once() -> None:
    """With its context; everything below takes it. The checks of a config, and its explanation, have no run."""
    derived = [name for name in MODULES if "Plan.of(" in MODULES[name].read_text() and folder_of(name) != "config"]
    assert derived == ["train.context"]


def test_names_of_the_kl_metrics_stand_once() -> None:
    names = {*KL_METRICS, *map(largest_of, KL_METRICS)}
    for module, path in MODULES.items():
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert module == "train.rl.kl_metrics" or not names & texts, module


def test_a_config_loads_without_jax() -> None:
    """Nor flax nor tokenizers: a config is checked on any machine."""
    for module in (name for name in MODULES if folder_of(name) == "config"):
        tree = ast.parse(MODULES[module].read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"jax", "flax", "tokenizers", "optax", "orbax", "numpy"}, f"{module} imports {roots}"


def test_one_folder_asks_how_many_processes_there_are() -> None:
    """Everything else goes through `train.distributed`, so that one process and many take the same way."""
    requests = ("process_index", "process_count", "is_fully_addressable", "multihost_utils", "addressable_shards")
    requests += ("make_array_from_process_local_data", "jax.distributed", "jax._src import")
    for module, path in MODULES.items():
        if folder_of(module) != "distributed":
            actual = [word for word in requests if word in path.read_text()]
            assert not actual, f"{module} asks for {', '.join(actual)}; call train.distributed"

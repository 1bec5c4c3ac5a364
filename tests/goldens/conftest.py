"""The files that need PyTorch, which is no dependency of the project, are not collected."""

collect_ignore = [
    "systems",
    "parity",
    "presets",
    "formulas",
    "router_losses.py",
    "models/generate.py",
    "tokenizers/generate.py",
]

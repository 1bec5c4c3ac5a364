"""SmolLM2-135M-Instruct, which a package of PyPI has as GGUF: compared with transformers; `make test-real` runs it."""

"""The whole way, with transformers and PEFT at both ends; `make test-transformers` runs it."""

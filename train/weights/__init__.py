"""Weights between arrays and disk: orbax, Hugging Face folders, PEFT adapters."""

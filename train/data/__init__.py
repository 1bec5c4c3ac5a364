"""Prompts, tasks and tokenizers."""

"""Sampling and updates of whole models: kljax, Tunix and transformers, each in a process of its own."""

"""Sampling and updates of whole models: kljax, Tunix and transformers."""

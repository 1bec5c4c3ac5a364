"""Sequences of tokens: their fields, the batch of them, and the slots in which they go through a model."""

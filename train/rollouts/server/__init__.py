"""Completions from an OpenAI-compatible server such as vLLM."""

from train.rollouts.server.client import Client
from train.rollouts.server.source import ServerSource

__all__ = ["Client", "ServerSource"]

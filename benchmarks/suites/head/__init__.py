"""The LM head and its loss: contenders in JAX and PyTorch."""

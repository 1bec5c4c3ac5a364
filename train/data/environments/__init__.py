"""Environments of the recipes; they import nothing of the trainer, as a worker process loads them."""

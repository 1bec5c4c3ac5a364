"""The trainer's loop with and without logging and checkpoints, and with a server."""

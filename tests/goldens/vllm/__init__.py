"""Recorded answers of a real vLLM, and the script that records them."""

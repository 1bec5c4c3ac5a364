"""GGUF files, the format of llama.cpp: imported as Hugging Face folders."""

from train.weights.gguf.folder import import_gguf, imported_folder, is_gguf

__all__ = ["import_gguf", "imported_folder", "is_gguf"]

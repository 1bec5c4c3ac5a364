"""Loading and saving of Hugging Face folders."""

from train.weights.huggingface.contents import check_folder, folder_arrays, is_folder
from train.weights.huggingface.digest import folder_digest
from train.weights.huggingface.load import load_params
from train.weights.huggingface.save import save_folder

__all__ = ["check_folder", "folder_arrays", "folder_digest", "is_folder", "load_params", "save_folder"]

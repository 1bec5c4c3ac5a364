"""Hugging Face folders in and out."""

from train.models.folder.contents import check_folder, is_folder
from train.models.folder.digest import folder_digest
from train.models.folder.load import load_params
from train.models.folder.save import save_folder

__all__ = ["check_folder", "folder_digest", "is_folder", "load_params", "save_folder"]

"""Models of the Hugging Face Hub: the files of a commit into the cache, and an export into a repository."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.config.download import HUB_NAME, hub_program
from train.config.errors import UserError
from train.weights.huggingface.contents import weight_files

# Other files of a repository are the same weights in other formats.
READ = ("*.json", "*.jinja", "*.safetensors")
UNREAD = ("*/*.json", "*/*.safetensors", "consolidated*.safetensors")


def hub_folder(name: str, revision: str) -> Path:
    """Returns the folder of a commit in the cache of the Hub, after the download of the files that are missing there.

    Args:
      name: `org/name` of a model.
      revision: the full hash of a commit.

    Raises:
      UserError: there is no such repository or commit, it is gated, or the Hub cannot be reached.
    """
    import huggingface_hub

    files = {"allow_patterns": list(READ), "ignore_patterns": list(UNREAD)}
    load = functools.partial(huggingface_hub.snapshot_download, name, revision=revision, **files)
    try:
        # Files of a commit never change: those in the cache need no network.
        folder = Path(load(local_files_only=True))
        if _is_complete(folder):
            return folder
    except huggingface_hub.errors.LocalEntryNotFoundError:
        pass
    return Path(_ask("model.path", name, load, revision=revision))


def _is_complete(folder: Path) -> bool:
    """Whether an interrupted download left nothing out."""
    try:
        weight_files(folder)
    except FileNotFoundError:
        return False
    except ValueError:
        # The index is damaged, which reading the folder says.
        return True
    return (folder / "config.json").is_file()


def make_repository(name: str) -> None:
    """Makes a private repository of that name, unless there is one, so that an export can be pushed to it.

    Raises:
      UserError: the name is none, nobody is logged in or may not write there, or the Hub cannot be reached.
    """
    import huggingface_hub

    if not HUB_NAME.fullmatch(name):
        raise UserError(f"--push: got {name!r}, expected the name of a repository, as org/name")
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push: nobody is logged in to the Hub; run {hub_program()} auth login, or set HF_TOKEN")
    create = functools.partial(huggingface_hub.HfApi().create_repo, name, private=True, exist_ok=True)
    _ask("--push", name, create)


def push(folder: Path, name: str, message: str) -> str:
    """Uploads a folder as one commit; returns the address of the commit.

    Raises:
      UserError: the Hub refused it or cannot be reached; the folder stays.
    """
    import huggingface_hub

    upload = functools.partial(
        huggingface_hub.HfApi().upload_folder, repo_id=name, folder_path=folder, commit_message=message
    )
    return str(_ask("--push", name, upload).commit_url)


def _ask(field: str, name: str, ask: Callable[[], Any], *, revision: str | None = None) -> Any:
    """Calls the Hub; raises a `UserError` for each way in which it can refuse."""
    import httpx2
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    log_in = f"{hub_program()} auth login"
    try:
        return ask()
    except errors.GatedRepoError:
        problem = f"{field}: {name} is gated; accept its terms at {page}, and run {log_in}"
    except errors.RevisionNotFoundError:
        problem = f"model.revision: {name} has no commit {revision}; see {page}/commits/main"
    except errors.RepositoryNotFoundError:
        problem = f"{field}: the Hub has no model {name}, or not for you; check the name, or run {log_in}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx2.TransportError) as error:
        problem = f"{field}: cannot reach {constants.ENDPOINT} for {name}: {_reason(error)}"
        if revision is not None:
            problem += (
                f"; where there is a network, run {hub_program()} download {name} --revision {revision} "
                "--local-dir FOLDER, and set model.path to the folder"
            )
    except errors.HfHubHTTPError as error:
        answer = error.response.status_code
        refused = f"; run {log_in} with a token that may write there" if answer in (401, 403) else ""
        problem = f"{field}: {constants.ENDPOINT} answered {answer} for {name}{refused}"
    raise UserError(problem)


def _reason(error: BaseException) -> str:
    """Returns the first line of the error at the end of the chain, which says what did not work."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0]

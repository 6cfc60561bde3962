"""Fetches a repository of the Hugging Face hub: configuration, tokenizer, safetensors, or one GGUF. Never a pickle."""

import errno
import sys
from pathlib import Path
from typing import Any

from lampejo.errors import UserError

_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["*/*", "consolidated*"]  # subfolders, and Mistral's second copy of the same weights


def fetch(repo: str, revision: str | None, file: str | None, progress: bool = True) -> Path:
    """The folder (safetensors) or file (GGUF) of ``repo`` in the hub's own cache, downloaded if it is not there.

    ``file`` chooses one GGUF of several. Without a network the cached copy serves.
    """
    import huggingface_hub as hf  # here, since it takes half a second that other sources need not spend
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    shown = progress and sys.stderr is not None and sys.stderr.isatty()
    (enable_progress_bars if shown else disable_progress_bars)()
    at: dict[str, Any] = {"repo_id": repo, "revision": revision}
    try:
        # Not list_repo_files: without a network it tries again for 23 s, this fails at once.
        siblings = hf.HfApi().model_info(repo, revision=revision, timeout=20).siblings
        files = [sibling.rfilename for sibling in siblings or []]
    except errors.GatedRepoError:
        raise _gated(repo) from None
    except errors.RevisionNotFoundError:
        raise _no_revision(repo, revision) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise _no_such(repo) from None
    except Exception as error:  # requests, httpx or httpx2, by the version of huggingface_hub: all mean "no network"
        return _cached(at, file, f"{type(error).__name__}: {error}")
    try:
        if file is None and any("/" not in name and name.endswith(".safetensors") for name in files):
            return Path(hf.snapshot_download(**at, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
        return Path(hf.hf_hub_download(**at, filename=_choose_gguf(repo, files, file)))
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise UserError(
                f"No space left on device for {repo}.", "Make room, or let HF_HOME name another folder."
            ) from None
        return _cached(at, file, f"{type(error).__name__}: {error}")


def fetch_config(repo: str, revision: str | None) -> Path | None:
    """The ``config.json`` of ``repo`` alone, from the hub or what an earlier run fetched; None where neither has it.

    ``UserError`` where the hub can be reached and refuses.
    """
    import huggingface_hub as hf
    from huggingface_hub import errors

    at: dict[str, Any] = {"repo_id": repo, "revision": revision, "filename": "config.json"}
    try:
        hf.HfApi().model_info(repo, revision=revision, timeout=10)  # tells at once that there is no network
        return Path(hf.hf_hub_download(**at))
    except errors.GatedRepoError:
        raise _gated(repo) from None
    except errors.RevisionNotFoundError:
        raise _no_revision(repo, revision) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise _no_such(repo) from None
    except errors.EntryNotFoundError:
        return None
    except Exception:  # no network, by many names
        try:
            return Path(hf.hf_hub_download(**at, local_files_only=True))
        except Exception:  # not there
            return None


def _gated(repo: str) -> UserError:
    return UserError(
        f"The repository {repo} is gated.",
        f"Accept its terms at https://huggingface.co/{repo} and run 'hf auth login'.",
    )


def _no_revision(repo: str, revision: str | None) -> UserError:
    return UserError(f"The repository {repo} has no revision {revision!r}.", "Check the name after the @.")


def _no_such(repo: str) -> UserError:
    from lampejo.weights.aliases import ALIASES

    return UserError(
        f"{repo!r} is neither a local path nor a repository of the hub that you may read.",
        f"Check its name (org/name), or use an alias ({', '.join(ALIASES)}); private ones need 'hf auth login'.",
    )


def _choose_gguf(repo: str, files: list[str], file: str | None) -> str:
    ggufs = [name for name in files if name.endswith(".gguf")]
    listed = ", ".join(f"{repo}:{name}" for name in ggufs[:12]) or "none"
    if file is not None:
        if file not in ggufs:
            raise UserError(f"{repo} has no file {file!r}.", f"Its GGUF files: {listed}.")
        chosen = file
    elif len(ggufs) == 1:
        chosen = ggufs[0]
    elif ggufs:
        raise UserError(f"{repo} has {len(ggufs)} GGUF files.", f"Name one: {listed}.")
    else:
        raise UserError(
            f"{repo} has neither safetensors nor GGUF files; lampejo never loads pickles.", "Choose another repository."
        )
    if "-of-0" in chosen:
        raise UserError(
            f"{chosen} is one part of a split GGUF.",
            "Join the parts with llama-gguf-split --merge, then give that file.",
        )
    return chosen


def is_cached(repo: str) -> bool:
    """Whether an earlier run has fetched the repository; asks no network."""
    try:
        _cached({"repo_id": repo, "revision": None}, None, "not asked")
    except UserError:
        return False
    return True


def _cached(at: dict[str, Any], file: str | None, reason: str) -> Path:
    """What an earlier run has fetched; ``UserError`` with ``reason`` and the way out if that is not complete."""
    import huggingface_hub as hf

    try:
        if file is not None:
            return Path(hf.hf_hub_download(**at, filename=file, local_files_only=True))
        folder = Path(
            hf.snapshot_download(**at, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=True)
        )
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return ggufs[0]
    except Exception as error:  # not cached, or not completely: told below
        reason = reason or str(error)
    missing = file or "config.json, tokenizer.json and *.safetensors"
    revision = f" --revision {at['revision']}" if at["revision"] else ""
    raise UserError(
        f"Missing {missing} of {at['repo_id']}, and the hub cannot be reached ({reason.splitlines()[0][:160]}).",
        f"Check the network; or run 'hf download {at['repo_id']}{revision} --local-dir FOLDER' elsewhere, "
        "bring FOLDER here and give its path.",
    )

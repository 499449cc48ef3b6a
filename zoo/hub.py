"""Find a model's directory. A repository of the Hugging Face Hub is downloaded to its cache first.

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what they mean to `huggingface_hub`.
"""

from __future__ import annotations

import re
from pathlib import Path

POSSIBLE = "a model is a directory, or a repository ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub"
IMAGES = ["*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp", "*.svg", "*.mp4"]
LEFTOVERS = ["optimizer*", "scheduler.pt", "rng_state*", "training_args.bin"]  # of a training run
# Copies of weights for other runtimes or earlier releases: of Chatterbox, and of CosyVoice 2.
COPIES = [
    "t3_*.pt",
    "CosyVoice-BlankEN/model.safetensors",
    "flow.decoder.estimator.fp32.onnx",
    "speech_tokenizer_v2.batch.onnx",
]
# Of a repository with several models, the files of the one that is read: those that its own class fetches.
ONE_MODEL = {
    "ResembleAI/chatterbox": [
        *("t3_cfg.safetensors", "s3gen.safetensors", "ve.safetensors"),
        *("tokenizer.json", "conds.pt"),
    ]
}
IGNORED = [".gitattributes", "*.md", *IMAGES, *LEFTOVERS, *COPIES]  # files that no family reads
# Some repositories hold the weights again under the original names. With this index they are not needed.
TRANSFORMERS_INDEX = "transformers.safetensors.index.json"
ORIGINAL = ["model.safetensors", "ckpt.pt"]
_REPOSITORY = re.compile(r"(?P<id>\w[\w.-]*/(?P<name>\w[\w.-]*))(@(?P<revision>\S+))?", re.ASCII)


def local_directory(model: str | Path) -> Path:
    """Return a model's directory. An existing directory never needs the network. Raises ValueError."""
    path = Path(model)
    if path.is_dir():
        return path
    match = _REPOSITORY.fullmatch(str(model))
    if match is None or path.exists():
        raise ValueError(f"{str(model)!r} is not a directory; {POSSIBLE}")
    return _fetched(match["id"], match["revision"])


def codec_directory(directory: Path, folder: str, repository: str, model: str) -> Path:
    """Return the directory of a codec that has its own checkpoint: DIRECTORY/FOLDER, DIRECTORY/../FOLDER,
    else the Hub's copy. Raises ValueError that says where it may lie."""
    for parent in (directory, directory.parent):
        if (parent / folder).is_dir():
            return parent / folder
    try:
        return local_directory(repository)
    except ValueError as error:
        here = f"put it into {directory / folder} or {directory.parent / folder}"
        raise ValueError(f"the codec of {model}, {repository}, is missing: {here} ({error})") from None


def cached_directory(repository: str) -> Path | None:
    """Return the Hub's copy of a repository if it was downloaded before, else None. Nothing is fetched."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (errors.LocalEntryNotFoundError, OSError):
        return None


def split_adapter(model: str | Path) -> tuple[str, Path | None]:
    """Split MODEL or MODEL+ADAPTER into model and adapter, a directory or None. Raises ValueError."""
    base, plus, adapter = str(model).rpartition("+")
    if not plus or Path(model).is_dir():
        return str(model), None
    if not Path(adapter).is_dir():
        raise ValueError(f"{adapter!r} is not a directory; a model with an adapter is MODEL+DIRECTORY")
    return base, Path(adapter)


def resolved(model: str) -> str:
    """Return the model as DIR or DIR+ADAPTER, downloaded if necessary. Raises ValueError."""
    base, adapter = split_adapter(model)
    directory = str(local_directory(base))
    return directory if adapter is None else f"{directory}+{adapter.resolve()}"


def name_of(model: str) -> str:
    """Return a model's name: that of its directory or repository, and that of its adapter."""
    base, adapter = split_adapter(model)
    return _name_of(base) if adapter is None else f"{_name_of(base)}+{adapter.resolve().name}"


def _name_of(model: str) -> str:
    match = _REPOSITORY.fullmatch(model)
    if match is None or Path(model).is_dir():
        return Path(model).resolve().name
    return match["name"]


def published_name(directory: Path) -> str:
    """Return the name that a model was published under: its repository's if the directory is in the Hub's cache, which
    is .../models--ORG--NAME/snapshots/COMMIT, else the directory's."""
    directory = directory.absolute()
    kind, _, name = directory.parent.parent.name.rpartition("--")
    return name if directory.parent.name == "snapshots" and kind.startswith("models--") else directory.name


def repository_of(model: str) -> str | None:
    """Return the repository ORG/NAME of a model from the Hub, without its revision and adapter; None for a
    directory."""
    base, _ = split_adapter(model)
    match = _REPOSITORY.fullmatch(base)
    return None if match is None or Path(base).is_dir() else match["id"]


def _fetched(repository: str, revision: str | None) -> Path:
    """Download a repository, without weights that it holds twice or of other models, and return its directory.
    Raises ValueError."""
    from huggingface_hub import errors, snapshot_download

    try:
        if repository in ONE_MODEL:
            files = ONE_MODEL[repository]
            return Path(snapshot_download(repository, revision=revision, allow_patterns=files))
        index = snapshot_download(repository, revision=revision, allow_patterns=[TRANSFORMERS_INDEX])
        twice = ORIGINAL if (Path(index) / TRANSFORMERS_INDEX).is_file() else []
        return Path(snapshot_download(repository, revision=revision, ignore_patterns=IGNORED + twice))
    except errors.GatedRepoError:
        advice = f"accept its terms at huggingface.co/{repository}, then run `hf auth login` or set HF_TOKEN"
        raise ValueError(f"{repository} is gated: {advice}") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{repository} has no revision {revision!r} on the Hugging Face Hub") from None
    except errors.RepositoryNotFoundError:
        where = "is neither a directory nor a repository of the Hugging Face Hub"
        advice = "for a private repository, run `hf auth login` or set HF_TOKEN"
        raise ValueError(f"{repository!r} {where}; {advice}") from None
    except errors.LocalEntryNotFoundError as error:
        reason = _first_line(error.__cause__ or error)
        where = "is not a directory and is not complete in the Hugging Face cache"
        raise ValueError(f"{repository!r} {where}, and it cannot be fetched: {reason}") from None
    # A full disk, a broken connection (its class depends on the HTTP client), or an error of hf_xet.
    except (OSError, errors.HTTPError, RuntimeError) as error:
        raise ValueError(f"{repository!r} cannot be fetched: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

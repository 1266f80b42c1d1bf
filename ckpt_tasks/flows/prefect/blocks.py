"""Blocks, which Prefect's server stores: locations of checkpoints with their credentials, and clusters that train.

A `CheckpointStore` can be named as block://NAME/PATH wherever a checkpoint directory is expected (decision 0022).
Parameters, logs and the ledger hold the block's name or its URL; its secrets only pass from Prefect's server to the
store's client. Prefect's server and its workers import this module when they start, so it must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict
from pydantic import ConfigDict, Field, HttpUrl, ValidationError, model_validator

from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.flows.prefect.embedded import start_embedded_server
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.secrets import secret_options, without_secrets

_OVERLOADED = (408, 429)
_RUN_KEY = "{run_key}"
_B = TypeVar("_B", bound=Block)
_NAME = re.compile(r"[a-z0-9-]+")  # Prefect's rule; another name could change the path of the API call.
_IMAGES = "https://raw.githubusercontent.com/PrefectHQ/prefect/420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9/assets"


class CheckpointStore(Block):
    """A location for checkpoints, with its credentials; its ConfigErrors never contain a secret.

    When the store is opened, `secrets` are merged into `storage_options`, and replace options of the same name.
    """

    # Validation errors must not show a secret, and a misspelled field is an error.
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", hide_input_in_errors=True)

    _block_type_name = "Checkpoint Store"
    _block_type_slug = "checkpoint-store"
    _logo_url = HttpUrl(f"{_IMAGES}/block-logos/filesystem.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
    _description = "A directory or an object store for checkpoints, with its credentials. Use block://NAME wherever a checkpoint directory is expected."  # noqa: E501 (shown in Prefect's pages)
    _code_example = """
```python
from ckpt_tasks import CheckpointConfig
from ckpt_tasks import CheckpointStore

checkpoint_store = CheckpointStore.load("BLOCK_NAME")
config = CheckpointConfig(checkpoint_dir="block://BLOCK_NAME/my-run")  # or name the block here
```"""

    url: str = Field(
        description="A directory (/data/runs) or a place in an object store (s3://bucket/runs). The path after"
        " the block's name is added to it, or replaces {run_key} in it."
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        title="Storage options",
        description="Options of the store's file system (s3fs, adlfs, gcsfs) that are not secret.",
    )
    secrets: SecretDict = Field(
        default_factory=lambda: SecretDict({}),
        description="Secret options: keys, tokens, passwords. They override the storage options.",
    )
    single_writer: bool = Field(
        default=False,
        title="Single writer",
        description="Do without conditional writes: you make sure that only one process writes at a time.",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_slug(cls, values: Any) -> Any:
        """Drop `block_type_slug`, which a dump adds to the fields; Prefect has checked its value."""
        if isinstance(values, Mapping):
            return {key: value for key, value in values.items() if key != "block_type_slug"}
        return values

    def block_initialization(self) -> None:
        """Check the location and the options (Prefect calls this after validation); raise ConfigError for a bad one."""
        for where in secret_options(self.storage_options):
            raise ConfigError(f"{where} holds a secret that everyone can read", hint="Put it under secrets.")
        scheme, separator, path = self.url.partition("://")
        if scheme == "block":
            raise ConfigError("a block cannot name another block", hint="Name an absolute directory or a URL.")
        if (not separator or scheme == "file") and not (path or self.url).startswith("/"):
            shown = without_secrets(self.url)
            raise ConfigError(f"{shown!r:.200} is a relative directory", hint="Name an absolute directory or a URL.")
        self.location("run" if _RUN_KEY in self.url else "").open()

    def location(self, below: str = "", run_key: str | None = None) -> Location:
        """Return the block's location, or the location of the path `below` it.

        Replaces {run_key} in the URL by `below`, or by `run_key` if `below` is empty. Raises ConfigError if the URL has
        {run_key} and both are empty, or if `below` is not a path inside the block's location.
        """
        parts = below.rstrip("/").split("/") if below else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ConfigError(f"{below!r:.200} is not a path below a block's place")
        run = "/".join(parts)
        if _RUN_KEY in self.url:
            if not (run or run_key):
                raise ConfigError(f"{self.url} needs a run's key", hint="Name the run: block://NAME/RUN_KEY.")
            url = self.url.replace(_RUN_KEY, run or str(run_key))
        else:
            url = f"{self.url.rstrip('/')}/{run}" if run else self.url
        options = _merged(self.storage_options, self.secrets.get_secret_value())
        return Location(url, storage_options=options, single_writer=self.single_writer)


def resolve(path: str, run_key: str | None) -> Location:
    """Return the location of block://`path`: a block's name, and perhaps a path below its location.

    Raises ConfigError if there is no such block, StoreError if Prefect's server does not answer.
    """
    name, _, below = path.partition("/")
    return _read(CheckpointStore, name, "url=…, secrets=…").location(below, run_key)


class RayCluster(Block):
    """A Ray cluster that trains programs on many ranks: its name, the resources of each rank, and its environment."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    _block_type_name = "Training Ray Cluster"
    _block_type_slug = "training-ray-cluster"
    _logo_url = HttpUrl(f"{_IMAGES}/block-logos/filesystem.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
    _description = "A Ray cluster on which flows train. Name it as block://NAME in the parameter engine."

    address: str = Field(description="Where Ray's head listens (10.0.0.1:6379), or auto on one of its nodes.")
    resources_per_rank: dict[str, float] = Field(
        default_factory=dict,
        title="Resources per rank",
        description="What a rank takes of its node [default: one GPU, or one CPU where the cluster has no GPU].",
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        title="Runtime environment",
        description="Ray's runtime_env for the ranks: working_dir, env_vars and so on. Not for secrets.",
    )

    @classmethod
    def named(cls, place: str) -> Self:
        """Return the block of block://NAME. Raises ConfigError if it does not exist, StoreError without a server."""
        return _read(cls, place.removeprefix("block://"), "address=…")


def api_is_away(error: Exception) -> bool:
    """Return True if Prefect's API is overloaded or does not answer, so that a retry may help; False for a refusal."""
    status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
    return isinstance(error, httpx.HTTPError) and (status in (0, *_OVERLOADED) or status >= 500)


def _read(kind: type[_B], name: str, fields: str) -> _B:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is not a block's name", hint="Use lowercase letters, digits and dashes.")
    slug = kind.get_block_type_slug()
    start_embedded_server()
    try:
        # Block.load would return a coroutine in a running event loop, and send an event for every read.
        with get_client(sync_client=True) as client:
            document = client.read_block_document_by_name(name, slug)
    except ObjectNotFound as error:
        creation = f"{kind.__name__}({fields}).save({name!r})"
        raise ConfigError(
            f"Prefect's server has no block {name!r:.80} of the type {slug}",
            hint=f"Create it in Prefect's pages (Blocks, {kind.get_block_type_name()}), or in Python: {creation}.",
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, RuntimeError, ValueError) as error:
        why = without_secrets(str(error)) or type(error).__name__
        unread = StoreError(
            f"the block {name!r:.80} cannot be read: {why:.300}",
            hint="Check PREFECT_API_URL, and that the server runs there: `ckpt doctor`.",
        )
        unread.transient = api_is_away(error)
        raise unread from None  # The client's message may contain a password of that URL.
    try:
        return kind.model_validate(document.data)
    except ValidationError as error:
        raise ConfigError(f"the block {name!r:.80} is not what this version calls {kind.__name__}: {error}") from None


def _merged(options: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options, including nested ones; options in `over` replace the others."""
    both = {**options, **over}
    for key in options.keys() & over.keys():
        if isinstance(options[key], Mapping) and isinstance(over[key], Mapping):
            both[key] = _merged(options[key], over[key])
    return both

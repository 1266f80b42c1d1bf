"""The block `CheckpointStore`: a place by its name, and credentials that are seen nowhere."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ValidationError
from typer.testing import CliRunner

from ckpt_tasks import CheckpointConfig, Checkpointer, open_run
from ckpt_tasks.cli import app
from ckpt_tasks.errors import ConfigError, StoreError
from ckpt_tasks.flows.evaluate import evaluate
from ckpt_tasks.flows.prefect.blocks import CheckpointStore, resolve
from ckpt_tasks.flows.train import train
from ckpt_tasks.storage.locations import GROUP, Location
from tests.servers.s3 import S3Server
from tests.support.tiny import Tiny

TINY = "tests.support.tiny:Tiny"
SECRET = "HUSHa1b2c3d4"
# Within the package `prefect` is imported by orchestration/ alone; in a server's process that must not cost a torch.
NOTHING_HEAVY = (
    "import sys, ckpt_tasks.flows.prefect.blocks; print(sorted({'torch', 'pyarrow', 's3fs'} & {*sys.modules}))"
)


# ── the block by itself ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_importing_the_block_brings_in_nothing_heavy() -> None:
    """Prefect's server and workers import it when they start: without torch, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", NOTHING_HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_says_what_it_brings() -> None:
    """Prefect finds the block, and we find its scheme, by the entry points of the installed package."""
    collections = {one.name: one.value for one in entry_points(group="prefect.collections")}
    assert collections["ckpt_tasks"] == "ckpt_tasks.flows.prefect.blocks"
    assert [(one.name, one.load()) for one in entry_points(group=GROUP)] == [("block", resolve)]


@pytest.mark.parametrize(
    ("url", "below", "run_key", "expected"),
    [
        ("s3://b", "", None, "s3://b"),
        ("s3://b/runs/", "lm/7", None, "s3://b/runs/lm/7"),
        ("s3://b/runs/{run_key}", "lm-7", None, "s3://b/runs/lm-7"),
        ("s3://b/runs/{run_key}/c", "", "lm-7", "s3://b/runs/lm-7/c"),
        ("s3://b/runs/{run_key}", "lm-7/", "other", "s3://b/runs/lm-7"),
        ("/data/runs", "lm-7", None, "/data/runs/lm-7"),
        ("file:///data/runs", "lm-7", None, "file:///data/runs/lm-7"),
    ],
)
def test_a_path_is_added_or_stands_in_for_the_run(url: str, below: str, run_key: str | None, expected: str) -> None:
    """What follows the block's name is added to its URL, or takes the place of {run_key} in it."""
    assert CheckpointStore(url=url).location(below, run_key).url == expected


def test_secrets_are_merged_over_the_options_at_the_end() -> None:
    """Also within sets of options; neither the block, its dump nor the place shows them."""
    options = {"client_kwargs": {"endpoint_url": "http://h:9", "region_name": "x"}}
    secrets = {"secret": SECRET, "client_kwargs": {"aws_session_token": SECRET, "region_name": "y"}}
    block = CheckpointStore(url="s3://b", storage_options=options, secrets=secrets, single_writer=True)  # type: ignore[arg-type]
    location = block.location()
    assert location.storage_options == {
        "client_kwargs": {"endpoint_url": "http://h:9", "region_name": "y", "aws_session_token": SECRET},
        "secret": SECRET,
    }
    assert location.single_writer
    shown = f"{block} {block!r} {block.model_dump()} {block.model_dump_json()} {location} {location!r}"
    assert SECRET not in shown
    assert CheckpointStore.model_validate(block.model_dump()).location() == location


@pytest.mark.parametrize(
    "fields",
    [
        *({"url": url} for url in ("runs", "file://runs", "", "ftp://b/runs", "block://other", "s3://", "s3://b/../c")),
        {"url": f"s3://user:{SECRET}@b/c"},
        {"url": f"s3://b/c?sig={SECRET}"},
        {"url": "s3://b", "storage_options": {"secret": SECRET}},
        {"url": "s3://b", "storage_options": {"client_kwargs": {"aws_session_token": SECRET}}},
        {"url": "s3://b", "storage_options": {"endpoint_url": f"http://me:{SECRET}@h:9"}},
    ],
)
def test_what_would_fail_later_is_refused_early(fields: dict[str, Any]) -> None:
    """No place, no place for every host, a secret where all can read it: ConfigError, and nothing secret in it."""
    with pytest.raises(ConfigError) as caught:
        CheckpointStore(**fields)
    assert SECRET not in f"{caught.value!r} {caught.value}"
    assert SECRET.encode() not in pickle.dumps(caught.value)
    with pytest.raises(ValidationError) as misspelled:
        CheckpointStore(url="s3://b", secret=SECRET)  # type: ignore[call-arg]
    assert SECRET not in f"{misspelled.value!r}"


@pytest.mark.parametrize("below", ["..", "a/../../b", "a//b", "/etc", "."])
def test_no_name_leads_out_of_the_place(below: str) -> None:
    """A path below a block's place stays below it."""
    with pytest.raises(ConfigError, match="not a path below"):
        CheckpointStore(url="/data/runs").location(below)


# ── by its name ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def there(harness: None, ministack: S3Server, bucket: str) -> str:
    """Save a block of a bucket, with the credentials only there; return its name."""
    options = ministack.storage_options
    secrets = {name: f"{SECRET}-{name}" for name in ("key", "secret") if options.pop(name)}  # it believes any
    name = f"store-{bucket}"
    CheckpointStore(url=f"s3://{bucket}/runs", storage_options=options, secrets=secrets).save(name)  # type: ignore[arg-type]
    return name


def commit_one(place: str) -> None:
    program = Tiny()
    with Checkpointer(CheckpointConfig(checkpoint_dir=place, run_key="tiny")) as ckpt:
        program.train_step()
        ckpt.save(1, program.state)


@pytest.mark.usefixtures("harness")
def test_a_block_is_found_from_everywhere(tmp_path: Path) -> None:
    """In a loop, in threads, and within a running event loop; {run_key} in its URL is the config's."""
    CheckpointStore(url=f"{tmp_path}/{{run_key}}").save("local", overwrite=True)
    commit_one("block://local")
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda place: open_run(place, "tiny").find("latest").step, ["block://local"] * 4)]
    assert found == [1] * 4

    async def within_a_loop() -> int:
        return open_run("block://local/tiny").find("latest").step

    assert asyncio.run(within_a_loop()) == 1
    assert (tmp_path / "tiny" / "format.json").exists()
    with pytest.raises(ConfigError, match="needs a run's key"):
        open_run("block://local")


@pytest.mark.usefixtures("harness")
def test_a_block_that_is_not_there_is_named_with_the_way_to_make_it() -> None:
    """ConfigError: which block, and what to do; also for a name that no block can have, and in every verb."""
    for name in ("nobody", "no body", "", "../../admin/settings", "a%2Fb"):
        with pytest.raises(ConfigError):
            open_run(f"block://{name}/run")
    with pytest.raises(ConfigError, match=r"no block 'nobody'.*CheckpointStore\(url=…, secrets=…\)\.save\('nobody'\)"):
        Checkpointer(CheckpointConfig(checkpoint_dir="block://nobody"))
    done = CliRunner().invoke(app, ["ls", "block://nobody/run"])
    assert (done.exit_code, "has no block" in done.output) == (1, True)


@pytest.mark.usefixtures("harness")
def test_options_beside_a_block_are_refused() -> None:
    """A block brings its own options: which of two would be meant is not guessed."""
    with pytest.raises(ConfigError, match="brings its own"):
        Checkpointer(CheckpointConfig(checkpoint_dir=Location("block://x", storage_options={"key": SECRET})))
    known = Location("s3://b/c", storage_options={"key": "k"})
    assert known.resolve() is known
    with pytest.raises(ConfigError, match="not a place for checkpoints"):
        Location("blocks://b/c").open()


def test_no_server_is_an_error_of_ours() -> None:
    """A server that does not answer: StoreError with the address to check, not an exception of the client's."""
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), pytest.raises(StoreError) as caught:
        open_run("block://any/run")
    assert "PREFECT_API_URL" in str(caught.value)


# ── no secret anywhere ───────────────────────────────────────────────────────────────────────────────────────────


def told_by_prefect() -> str:
    """Return all that the API says of runs, logs, artifacts, events, deployments and blocks, page by page."""
    APILogWorker.drain_all(timeout=30)
    texts = []
    with get_client(sync_client=True) as client:
        ask: Any = client.request  # its type lists every path
        for name in ("flow_runs", "task_runs", "logs", "artifacts", "deployments", "block_documents"):
            for offset in range(0, 10_000, 200):
                answer = ask("POST", f"/{name}/filter", json={"offset": offset, "limit": 200})
                texts.append(answer.text)
                if len(answer.json()) < 200:
                    break
        answer = ask("POST", "/events/filter", json={"filter": {}, "limit": 50})
        while answer.json()["events"]:
            texts.append(answer.text)
            if not answer.json()["next_page"]:
                break
            answer = ask("GET", answer.json()["next_page"])
    return "\n".join(texts)


def files(*roots: Path) -> Iterator[tuple[str, bytes]]:
    """Read every file below these directories; runs of other tests may end meanwhile, and theirs are gone then."""
    for root in roots:
        for directory, _, names in os.walk(root):
            for path in (Path(directory, name) for name in names):
                with suppress(FileNotFoundError):
                    if path.is_file() and not path.is_symlink():
                        yield str(path), path.read_bytes()


@pytest.mark.slow
def test_no_secret_of_a_block_is_seen_anywhere(  # noqa: PLR0917 (fixtures)
    there: str,
    server: dict[str, str],
    ministack: S3Server,
    bucket: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A run with a failure, its evaluation, the command line and a run with wrong keys: no secret is left anywhere."""
    checkpoint: dict[str, Any] = {"checkpoint_dir": f"block://{there}/{{run_key}}", "max_num_checkpoints": None}
    checkpoint |= {"local_dir": str(tmp_path / "local")}
    params: dict[str, Any] = {"fail_at": 7, "failures": str(tmp_path / "failures")}
    options: dict[str, Any] = {"run_key": "tiny", "program": TINY, "batch_steps": 5, "retry_delay_seconds": 0.1}
    training: Any = train  # its parameters come from the API as plain dicts, too
    result = training(total_steps=10, checkpoint=checkpoint, params=params, **options)
    assert result.step == 10
    evaluate(run_key="tiny", checkpoint_dir=f"block://{there}/{{run_key}}", program=TINY, retries=0)
    assert [one.step for one in open_run(f"block://{there}/tiny").evaluations()] == [10]
    wrong: Any = CheckpointStore.load(there)
    wrong.url = f"s3://no-{bucket}/runs"
    wrong.save("wrong", overwrite=True)
    with pytest.raises(StoreError, match="NoSuchBucket") as caught:
        training(total_steps=10, checkpoint={"checkpoint_dir": "block://wrong/tiny"}, **options)
    for verb in ("ls", "show", "verify"):
        done = CliRunner().invoke(app, [verb, f"block://{there}/tiny", "--json"])
        assert f"s3://{bucket}/runs/tiny" in done.output
        assert done.exit_code == (0 if verb != "verify" else done.exit_code)
        capfd.readouterr()
    told = told_by_prefect()
    captured = capfd.readouterr()
    texts = {"api": told, "error": f"{caught.value!r}", "out": captured.out, "err": captured.err}
    assert "injected in step 7" in told  # it does look at logs
    assert f"block://{there}" in told  # … and at parameters
    objects = ministack.client().list_objects_v2(Bucket=bucket)["Contents"]
    assert any(one["Key"] == "runs/tiny/format.json" for one in objects)
    bodies = {f"s3 {one['Key']}": _body(ministack, bucket, one["Key"]) for one in objects}
    homes = (Path(os.environ["PREFECT_HOME"]), Path(server["PREFECT_HOME"]))
    roots = (tmp_path, *homes, *Path("/dev/shm").glob(f"ckpt-tasks-{os.getuid()}"))
    bodies |= dict(files(*roots))
    assert any(name.endswith(".db") for name in bodies)  # where Prefect's server keeps the block
    bodies |= {name: text.encode() for name, text in texts.items()}
    assert [name for name, body in bodies.items() if SECRET.encode() in body] == []


def _body(server: S3Server, bucket: str, key: str) -> bytes:
    body: bytes = server.client().get_object(Bucket=bucket, Key=key)["Body"].read()
    return body

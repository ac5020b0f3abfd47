"""Options of object stores: unknown names are refused, credentials are never shown or saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from raypipe import stores
from raypipe.config import dump, load, validate
from raypipe.errors import ConfigError, DataError
from raypipe.job import Job
from raypipe.tables import storage
from raypipe.tables.table import ImageTable, TableConfig

SECRET = "not-to-be-seen"
S3 = {
    "AWS_REGION": "eu-west-1",
    "AWS_ACCESS_KEY_ID": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": SECRET,
}
AZURE = {
    "account_name": "plant",
    "azure_storage_account_key": SECRET,
    "sas_token": SECRET,
    "azure_client_secret": SECRET,
}


@pytest.mark.parametrize(
    ("uri", "options", "kept"),
    [
        ("s3://b/t", S3, {"AWS_REGION": "eu-west-1"}),
        ("abfss://c@plant.dfs.core.windows.net/t", AZURE, {"account_name": "plant"}),
        ("gs://b/t", {"google_service_account_key": SECRET}, None),
        ("https+odd://h/t", {"whatever_it_reads": SECRET}, None),
        ("s3://b/t", {"AWS_ENDPOINT_URL": f"http://me:{SECRET}@host"}, None),
    ],
)
def test_what_is_written_holds_no_secret_and_loads_again(
    uri: str, options: dict[str, str], kept: dict[str, str] | None
) -> None:
    job = validate(Job, {"table": {"uri": uri, "storage_options": options}})
    assert job.table.storage_options == options
    assert SECRET not in dump(job) + repr(job) + str(job) + repr(
        ImageTable(uri, storage_options=options)
    )
    again = validate(Job, yaml.safe_load(dump(job)))
    assert again.table.storage_options == kept
    assert again == job.model_copy(
        update={"table": job.table.model_copy(update={"storage_options": kept})}
    )


def test_a_copy_with_other_settings_keeps_the_secret() -> None:
    job = validate(Job, {"table": {"uri": "s3://b/t", "storage_options": S3}})
    assert validate(Job, job.model_dump() | {"run": {"seed": 8}}).table.storage_options == S3


def test_values_of_yaml_are_texts_to_the_store() -> None:
    options = yaml.safe_load("{AWS_ALLOW_HTTP: true, max_retries: 3, timeout: 5s}")
    assert TableConfig(uri="s3://b/t", storage_options=options).storage_options == {
        "AWS_ALLOW_HTTP": "true",
        "max_retries": "3",
        "timeout": "5s",
    }


@pytest.mark.parametrize(
    ("uri", "name", "meant"),
    [
        ("s3://b/t", "AWS_ENDPOINT_ULR", "AWS_ENDPOINT_URL"),
        ("s3a://b/t", "aws_secret_acces_key", "aws_secret_access_key"),
        (
            "az://c/t",
            "azure_account_key",
            "azure_storage_account_key",
        ),  # object_store does not know the short one
        ("gs://b/t", "GOOGLE_SERVICE_ACOUNT", "GOOGLE_SERVICE_ACCOUNT"),
        ("az://c/t", "AWS_REGION", ""),
    ],
)
def test_a_name_that_the_store_would_not_read_is_refused(uri: str, name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"Unknown storage option {name}.*{meant}") as refused:
        TableConfig(uri=uri, storage_options={name: SECRET})
    assert SECRET not in str(refused.value)


def test_a_source_is_held_to_the_same(tmp_path: Path) -> None:
    source = {"kind": "delta", "images": "s3://b/t", "storage_options": {"AWS_REGOIN": SECRET}}
    with pytest.raises(ConfigError, match="Did you mean 'AWS_REGION'"):
        validate(Job, {"table": {"uri": str(tmp_path)}, "ingest": {"from": source}})


@pytest.mark.parametrize(
    "text",
    [
        "storage_options: not-to-be-seen",
        "storage_option: {AWS_SECRET_ACCESS_KEY: not-to-be-seen}",
        "storage_options: {AWS_SECRET_ACCESS_KEY: [not-to-be-seen]}",
        "AWS_SECRET_ACCESS_KEY: not-to-be-seen",
        "storage_options: {AWS_SECRET_ACCESS_KEY: not-to-be-seen: }",
        "storage_options: {AWS_SECRET_ACCESS_KEY: not-to-be-seen",
    ],
)
def test_a_mistake_beside_a_secret_does_not_show_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"table:\n  uri: s3://b/t\n  {text}\n")
    with pytest.raises(ConfigError) as refused:
        load(Job, path)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "override", ["table.storage_options.AWS_TOKEN=x", "ingest.from.storage_options={AWS_TOKEN: x}"]
)
def test_a_credential_is_not_submitted_on_a_command_line(override: str) -> None:
    with pytest.raises(ConfigError, match=r"dashboard would show a credential.*environment"):
        storage.refuse_credentials(["train.lr=0.1", override])
    storage.refuse_credentials(["train.lr=0.1", "table.storage_options.AWS_REGION=eu-west-1"])


def test_a_run_is_not_kept_behind_a_url() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir is wrong.*not behind a URL"):
        validate(Job, {"table": {"uri": "s3://b/t"}, "run": {"dir": "s3://b/runs"}})


def test_a_local_folder_has_no_store_to_blame() -> None:
    assert stores.cause(OSError("Connection refused"), "/tables/t") is None
    found: Callable[..., DataError] = storage.refusal
    assert str(found(OSError("no space"), "/tables/t", "It cannot be written", "Make space")) == (
        "It cannot be written: no space (got '/tables/t'). Make space."
    )

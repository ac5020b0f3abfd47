"""Files of versions in a catalog's own store of objects: uploads with temporary credentials.

The store is moto's server, which checks each request's credentials against its IAM: a role that may
read and write the bucket of the catalog. The credentials of this process may do nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from unittest.mock import patch

import boto3
import mlflow
import pytest
from botocore.exceptions import ClientError

from raypipe.errors import DataError
from raypipe.registry import fetching, promote, runs, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store
from tests.cloud.conftest import served
from tests.registry import unity_catalog
from tests.registry.unity_catalog import Bucket, Double

BUCKET = "of-the-catalog"
MINE = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "mine"}
ANYBODY = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}
ON_BUCKET = {
    "Effect": "Allow",
    "Action": ["s3:*"],
    "Resource": [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"],
}


def document(statement: dict[str, object]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


@dataclasses.dataclass
class Cloud:
    """The double, and its store. issued: the temporary credentials it gave away, in order."""

    endpoint: str
    double: Double
    issued: list[tuple[str, str, str]]

    def s3(self, credentials: tuple[str, str, str] | None = None) -> boto3.client:
        return _client("s3", self.endpoint, credentials)

    def held(self) -> list[str]:
        listed = self.s3(self.issued[-1]).list_objects_v2(Bucket=BUCKET)
        return [found["Key"] for found in listed.get("Contents", [])]


def _client(
    name: str, endpoint: str, credentials: tuple[str, str, str] | None = None
) -> boto3.client:
    key_id, secret, token = credentials or (*MINE.values(), None)
    return boto3.client(
        name,
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        aws_session_token=token,
    )


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    pytest.importorskip("moto.server", reason="moto is in the extra `dev`")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    ready = r"Running on (http://127\.0\.0\.1:\d+)"
    folder = tmp_path_factory.mktemp("catalog")
    with served(command, ready, folder) as endpoint:
        _client("s3", endpoint).create_bucket(Bucket=BUCKET)
        iam = _client("iam", endpoint)
        role = iam.create_role(RoleName="catalog", AssumeRolePolicyDocument=document(ANYBODY))
        iam.put_role_policy(
            RoleName="catalog", PolicyName="bucket", PolicyDocument=document(ON_BUCKET)
        )
        sts = _client("sts", endpoint)
        issued: list[tuple[str, str, str]] = []
        # As many roles as clients will ask for: from then on moto refuses who has no rights.
        ready_made = []
        for number in range(40):
            made = sts.assume_role(RoleArn=role["Role"]["Arn"], RoleSessionName=f"client{number}")
            given = made["Credentials"]
            kept = given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"]
            ready_made.append(kept)
        plain = {"Content-Type": "text/plain"}
        reset = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", b"0", plain)
        urllib.request.urlopen(reset, timeout=10).close()

        def credentials() -> tuple[str, str, str]:
            issued.append(ready_made[len(issued)])
            return issued[-1]

        def read(key: str) -> bytes | None:
            try:
                found = _client("s3", endpoint, ready_made[-1]).get_object(Bucket=BUCKET, Key=key)
            except ClientError:
                return None
            return bytes(found["Body"].read())

        bucket = Bucket(BUCKET, credentials, read)
        clouds = MINE | {"MLFLOW_S3_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        with (
            unity_catalog.serving(folder / "double", bucket=bucket) as double,
            patch.dict(os.environ, double.environment | clouds),
        ):
            yield Cloud(endpoint, double, issued)
        assert double.catalog.unknown == []


@pytest.fixture
def store(cloud: Cloud, shared_store: Store, request: pytest.FixtureRequest) -> Store:
    model = f"main.default.{request.node.originalname[:60]}"
    client = mlflow.MlflowClient(shared_store.address, "databricks-uc")
    return dataclasses.replace(shared_store, client=client, registry="databricks-uc", model=model)


def register(store: Store, built: Package, key: str) -> versions.ModelVersion:
    with runs.run(store, key, "train", {}, None) as run_id:
        pass
    return versions.register(store, run_id, built.folder, key, {})


@pytest.mark.cloud
def test_a_package_goes_there_and_back_with_temporary_credentials(
    cloud: Cloud, store: Store, built: Package, textured: Callable[..., bytes]
) -> None:
    # A control: this process's own credentials open nothing.
    with pytest.raises(ClientError, match=r"InvalidAccessKeyId|AccessDenied|403"):
        cloud.s3().list_objects_v2(Bucket=BUCKET)

    made = register(store, built, "k")
    assert cloud.issued, "the upload asked for credentials"
    location = cloud.double.catalog.versions[store.model][1]["storage_location"]
    inside = location.removeprefix(f"s3://{BUCKET}/")
    names = [key.removeprefix(f"{inside}/") for key in cloud.held() if key.startswith(inside)]
    assert "MLmodel" in names and any(name.endswith("weights.safetensors") for name in names)
    assert cloud.double.catalog.files == {}, "nothing went to the default storage"

    before = len(cloud.issued)
    promote.promote(store, made, None)
    champion = promote.require_champion(store)
    images = [textured(seed, 40) for seed in range(3)]
    assert fetching.fetch(store, champion).predict(images).labels == built.predict(images).labels
    assert len(cloud.issued) > before, "and so did the download"


@pytest.mark.cloud
def test_a_package_that_was_swapped_in_the_bucket_is_refused(
    cloud: Cloud, store: Store, built: Package
) -> None:
    made = register(store, built, "k")
    location = cloud.double.catalog.versions[store.model][1]["storage_location"]
    inside = location.removeprefix(f"s3://{BUCKET}/")
    [weights] = [
        key
        for key in cloud.held()
        if key.startswith(inside) and key.endswith("weights.safetensors")
    ]
    cloud.s3(cloud.issued[-1]).put_object(Bucket=BUCKET, Key=weights, Body=b"others")
    with pytest.raises(DataError, match="does not match its sha256"):
        fetching.fetch(store, made)


@pytest.mark.cloud
def test_credentials_that_open_nothing_leave_no_version(
    cloud: Cloud, store: Store, built: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A catalog whose role was changed: the version stays pending, and counts as none."""
    bucket = cloud.double.catalog.bucket
    assert bucket is not None
    shut = dataclasses.replace(bucket, credentials=lambda: ("AKIANOBODY", "secret", "token"))
    monkeypatch.setattr(cloud.double.catalog, "bucket", shut)
    with pytest.raises(Exception, match=r"Forbidden|AccessDenied|InvalidAccessKeyId|403"):
        register(store, built, "k")
    assert versions.find(store, "k") is None and versions.every(store) == []
    monkeypatch.setattr(cloud.double.catalog, "bucket", bucket)
    again = register(store, built, "k")
    assert versions.find(store, "k") == again and fetching.fetch(store, again).seal == built.seal

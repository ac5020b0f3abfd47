"""Object storage: which options reach it, which of them may be written down, and what its errors mean.

deltalake hands `storage_options` to object_store 0.13, which drops every name it does not know: with `AWS_ENDPOINT_ULR` your
keys go to the real S3 (measured). So a name must be one of those it reads. What is not set it takes from the environment of
each process (AWS_*, AZURE_*, GOOGLE_*).

Options may be secrets. They travel to Ray's workers in memory and are written nowhere: of a configuration that is kept (run
folder, MLflow, model package) only options known to be harmless are part, and whoever loads it again takes the rest from the
environment. Sources: from_str in object_store's src/{aws,azure,gcp,client}; delta-rs crates/{aws,core/src/logstore}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer

from raypipe.errors import (
    ConfigError,
    DataError,
    hidden,
    holds_secret,
    keep_secret,
    keep_secrets_of,
    nearest,
)


def _names(prefixes: tuple[str, ...], stems: str) -> set[str]:
    return {prefix + stem for prefix in prefixes for stem in stems.split()}


_ANY = (
    "max_retries retry_timeout backoff_config.init_backoff backoff_config.max_backoff backoff_config.base certificate_path "
    "max_concurrency concurrency_limit object_store_concurrency_limit"
)
_CLIENT = (
    "allow_http allow_invalid_certificates disable_system_certificates connect_timeout default_content_type http1_only "
    "http2_only http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_max_frame_size "
    "pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes randomize_addresses read_timeout timeout "
    "user_agent"
)
_S3 = (
    "default_region region bucket_name bucket endpoint_url endpoint virtual_hosted_style_request s3_express imdsv1_fallback "
    "metadata_endpoint unsigned_payload checksum_algorithm web_identity_token_file role_arn role_session_name "
    "endpoint_url_sts skip_signature copy_if_not_exists conditional_put disable_tagging disable_bulk_delete request_payer "
    "server_side_encryption sse_kms_key_id sse_bucket_key_enabled container_credentials_relative_uri "
    "container_credentials_full_uri container_authorization_token_file"
)
_DELTA_S3 = (
    "aws_endpoint_url_s3 aws_endpoint_url_dynamodb aws_region_dynamodb aws_profile aws_s3_addressing_style "
    "aws_s3_locking_provider aws_s3_allow_unsafe_rename aws_s3_assume_role_arn aws_s3_role_session_name aws_iam_role_arn "
    "aws_iam_role_session_name aws_s3_pool_idle_timeout_seconds aws_sts_pool_idle_timeout_seconds "
    "aws_s3_get_internal_server_error_retries aws_ec2_metadata_disabled aws_ec2_metadata_timeout aws_force_credential_load "
    "delta_dynamo_table_name delta_dynamo_billing_mode delta_dynamo_max_elapsed_request_time"
)
_AZURE = (
    "client_id tenant_id authority_id authority_host endpoint msi_endpoint identity_endpoint object_id msi_resource_id "
    "federated_token_file use_fabric_endpoint use_azure_cli skip_signature container_name disable_tagging "
    "fabric_token_service_url fabric_workload_host fabric_cluster_identifier credential_type"
)
_AZURE_STORAGE = (
    "account_name client_id tenant_id authority_id authority_host use_emulator endpoint"
)
_AZURE_KEYS = (
    "account_key access_key master_key client_secret sas_key sas_token token encryption_key"
)
_GCS = "service_account service_account_path bucket bucket_name base_url application_credentials skip_signature"
_HARMLESS = {  # by store: options whose values anybody may read
    "s3": _names(("",), f"{_ANY} {_DELTA_S3}") | _names(("", "aws_"), f"{_CLIENT} {_S3}"),
    "azure": _names(("",), _ANY)
    | _names(("", "azure_"), f"{_CLIENT} {_AZURE}")
    | _names(("", "azure_storage_"), _AZURE_STORAGE),
    "gs": _names(("",), _ANY) | _names(("", "google_"), f"{_CLIENT} {_GCS}"),
}
_SECRET = {
    "s3": _names(
        ("", "aws_"),
        "access_key_id secret_access_key session_token token sse_customer_key_base64 proxy_url",
    )
    | _names(("aws_",), "access_key_id_dynamodb secret_access_key_dynamodb session_token_dynamodb"),
    "azure": _names(("", "azure_storage_"), _AZURE_KEYS)
    | _names(("", "azure_"), "client_secret fabric_session_token proxy_url")
    | {"bearer_token"},
    "gs": _names(("", "google_"), "service_account_key bearer_token proxy_url"),
}
_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs"} | dict.fromkeys(
    ("az", "adl", "azure", "abfs", "abfss"), "azure"
)
_ANYWHERE = set[str]().union(*_HARMLESS.values())


def _as_text(options: Any) -> Any:
    """YAML's `true` and `10` as object_store wants them: "true", "10"."""
    if not isinstance(options, dict):
        return options
    return {
        k: str(v).lower() if isinstance(v, bool) else str(v) if isinstance(v, (int, float)) else v
        for k, v in options.items()
    }


def _written(options: dict[str, str] | None) -> dict[str, str] | None:
    """What of the options may be kept; an address with a password in it may not."""
    kept = {
        k: v
        for k, v in (options or {}).items()
        if k.lower() in _ANYWHERE and "@" not in v and not holds_secret(v)
    }
    return kept or None


StorageOptions = Annotated[
    dict[str, str] | None,
    BeforeValidator(_as_text),
    PlainSerializer(_written, return_type=dict[str, str] | None, when_used="json"),
]


def check(uri: str, options: dict[str, str] | None) -> None:
    """Raise ConfigError for an option that the store of `uri` would not read. Stores we do not know read what they read."""
    store = _STORES.get(uri.partition("://")[0])
    known = _HARMLESS[store] | _SECRET[store] if store else set()
    for name, value in (options or {}).items():
        if name.lower() not in _ANYWHERE:
            keep_secret(value)
        keep_secrets_of(value)
        if store and name.lower() not in known:
            cased = [n.upper() if name.isupper() else n for n in known]
            close = nearest(name, cased)
            raise ConfigError(
                f"Unknown storage option {name}",
                rule=f"{uri} would be opened without it",
                fix=close
                if close.startswith("Did")
                else "Options are those of object_store, like AWS_ENDPOINT_URL",
            )


def refuse_in_file(cfg: BaseModel, name: str = "") -> None:
    """Raise ConfigError for storage options that are credentials, anywhere in `cfg`: with --submit the configuration file
    travels to the cluster, which keeps it."""
    for attribute, value in cfg:
        here = f"{name}.{attribute}".removeprefix(".")
        if attribute == "storage_options" and (value or {}) != (_written(value) or {}):
            raise ConfigError(
                "A credential would travel to the cluster in a file that it keeps",
                got=f"{here}: {', '.join(sorted((value or {}).keys() - (_written(value) or {}).keys()))}",
                rule="--submit sends the working folder, and with it the configuration",
                fix=_WHERE_KEYS.partition(", or")[0],
            )
        if isinstance(value, BaseModel):
            refuse_in_file(value, here)


def refuse_credentials(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override that is no harmless option: a job's command line stands on the cluster's dashboard."""
    for override in overrides:
        section, named, option = override.partition("=")[0].partition("storage_options")
        if named and option.removeprefix(".").lower() not in _ANYWHERE:
            raise ConfigError(
                "A credential would stand on the cluster's dashboard",
                got=section + named + option,
                fix=_WHERE_KEYS,
            )


def refusal(error: Exception, uri: str, what: str, fix: str = "") -> DataError:
    """The DataError for what deltalake raised: the cause and the way out where it is the store's, else `what` and `fix`."""
    because, (_, said, rule, way_out) = plain(error), cause(error, uri) or ("", "", "", fix)
    return DataError(
        f"{what}: {said} ({_brief(because)})" if said else f"{what}: {because}",
        got=uri,
        rule=rule,
        fix=way_out,
    )


def cause(error: Exception, uri: str) -> tuple[str, str, str, str] | None:
    """(pattern, cause, rule, way out) when it is the object store that failed, and not the table."""
    text = plain(error)
    return next((c for c in _CAUSES if re.search(c[0], text)), None) if "://" in uri else None


_WHERE_KEYS = "Put them into the environment (AWS_*, AZURE_*, GOOGLE_*) of the driver and every node, or table.storage_options"
_CAUSES = (
    (
        "NoSuchBucket|ContainerNotFound|FilesystemNotFound|bucket does not exist",
        "there is no such bucket or container",
        "raypipe makes tables, not buckets",
        "Make it, or check table.uri",
    ),
    (
        "169.254.169.254|IMDS|credentials provider|No credentials",
        "there are no credentials",
        "",
        _WHERE_KEYS,
    ),
    (
        "Invalid Access Key|privileges|status code 40[13]|Unauthorized|Forbidden|SignatureDoesNotMatch|InvalidAccessKeyId",
        "the store refuses the credentials",
        "They must be valid for this bucket, for reading and for what is to be written",
        _WHERE_KEYS,
    ),
    (
        "Invalid table version",
        "the store lists a log from its beginning when asked for its end",
        "object_store 0.13 sends `startFrom` to Azure, which Azurite knows from 3.37 on",
        "Write to a store that knows it",
    ),
    (
        "scheme is not allowed",
        "the endpoint is plain http",
        "Only https is taken unasked",
        'Add AWS_ALLOW_HTTP: "true" (azure_allow_http) to table.storage_options, for a test server',
    ),
    (
        "dns error|error sending request|timed out|deadline has elapsed|[Cc]onnection (refused|reset|closed)",
        "the store cannot be reached",
        "It was tried for as long as max_retries (10) and retry_timeout (180s) of table.storage_options say",
        "Check the endpoint, the account's or the region's name, and the network",
    ),
)


def plain(error: Exception) -> str:
    """deltalake colours its messages and spreads them over lines, and may name addresses as they are."""
    return hidden(" ".join(re.sub(r"\x1b\[[0-9;]*m|↳", "", str(error)).split()))


def _brief(text: str) -> str:
    """Of an answer in XML its code and message; else the text, cut."""
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text)
    return f"{answer[1]}: {answer[2].split(' RequestId:')[0]}".rstrip(".") if answer else text[:400]

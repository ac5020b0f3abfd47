"""Object storage: options that reach it, options that may be saved, and what its errors mean.

deltalake hands `storage_options` to object_store 0.13, which ignores every name it does not know:
with `AWS_ENDPOINT_ULR` your keys go to the real S3 (measured). So raypipe refuses a name that
object_store does not read. An option that is not set comes from the environment of each process
(AWS_*, AZURE_*, GOOGLE_*).

Options may be secrets. They travel to Ray's workers in memory and are never saved. A saved
configuration (run folder, MLflow, model package) has only options known to be harmless. A process
that loads it takes the others from its environment. Sources: from_str in object_store's
src/{aws,azure,gcp,client}; delta-rs crates/{aws,core/src/logstore}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer

from raypipe import stores
from raypipe.errors import (
    ConfigError,
    DataError,
    FullDisk,
    Unreachable,
    holds_secret,
    keep_secret,
    keep_secrets_of,
    nearest,
)


def _names(prefixes: tuple[str, ...], stems: str) -> set[str]:
    """Every prefix with every stem."""
    names = set()
    for prefix in prefixes:
        names |= {prefix + stem for stem in stems.split()}
    return names


# Option names of object_store and delta-rs, separated by blanks; a prefix is added below.
_ANY = (
    "max_retries retry_timeout backoff_config.init_backoff backoff_config.max_backoff "
    "backoff_config.base certificate_path max_concurrency concurrency_limit "
    "object_store_concurrency_limit"
)
_CLIENT = (
    "allow_http allow_invalid_certificates disable_system_certificates connect_timeout "
    "default_content_type http1_only http2_only http2_keep_alive_interval "
    "http2_keep_alive_timeout http2_keep_alive_while_idle http2_max_frame_size "
    "pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes "
    "randomize_addresses read_timeout timeout user_agent"
)
_S3 = (
    "default_region region bucket_name bucket endpoint_url endpoint "
    "virtual_hosted_style_request s3_express imdsv1_fallback metadata_endpoint "
    "unsigned_payload checksum_algorithm web_identity_token_file role_arn role_session_name "
    "endpoint_url_sts skip_signature copy_if_not_exists conditional_put disable_tagging "
    "disable_bulk_delete request_payer server_side_encryption sse_kms_key_id "
    "sse_bucket_key_enabled container_credentials_relative_uri container_credentials_full_uri "
    "container_authorization_token_file"
)
_DELTA_S3 = (
    "aws_endpoint_url_s3 aws_endpoint_url_dynamodb aws_region_dynamodb aws_profile "
    "aws_s3_addressing_style aws_s3_locking_provider aws_s3_allow_unsafe_rename "
    "aws_s3_assume_role_arn aws_s3_role_session_name aws_iam_role_arn "
    "aws_iam_role_session_name aws_s3_pool_idle_timeout_seconds "
    "aws_sts_pool_idle_timeout_seconds aws_s3_get_internal_server_error_retries "
    "aws_ec2_metadata_disabled aws_ec2_metadata_timeout aws_force_credential_load "
    "delta_dynamo_table_name delta_dynamo_billing_mode delta_dynamo_max_elapsed_request_time"
)
_AZURE = (
    "client_id tenant_id authority_id authority_host endpoint msi_endpoint identity_endpoint "
    "object_id msi_resource_id federated_token_file use_fabric_endpoint use_azure_cli "
    "skip_signature container_name disable_tagging fabric_token_service_url "
    "fabric_workload_host fabric_cluster_identifier credential_type"
)
_AZURE_STORAGE = (
    "account_name client_id tenant_id authority_id authority_host use_emulator endpoint"
)
_AZURE_KEYS = (
    "account_key access_key master_key client_secret sas_key sas_token token encryption_key"
)
_GCS = (
    "service_account service_account_path bucket bucket_name base_url application_credentials "
    "skip_signature"
)

# By store: options whose values anybody may read.
_HARMLESS = {
    "s3": _names(("",), f"{_ANY} {_DELTA_S3}") | _names(("", "aws_"), f"{_CLIENT} {_S3}"),
    "azure": _names(("",), _ANY)
    | _names(("", "azure_"), f"{_CLIENT} {_AZURE}")
    | _names(("", "azure_storage_"), _AZURE_STORAGE),
    "gs": _names(("",), _ANY) | _names(("", "google_"), f"{_CLIENT} {_GCS}"),
}
# By store: options whose values are secrets, or may hold one.
_S3_KEYS = "access_key_id secret_access_key session_token token sse_customer_key_base64 proxy_url"
_DYNAMODB_KEYS = "access_key_id_dynamodb secret_access_key_dynamodb session_token_dynamodb"
_SECRET = {
    "s3": _names(("", "aws_"), _S3_KEYS) | _names(("aws_",), _DYNAMODB_KEYS),
    "azure": _names(("", "azure_storage_"), _AZURE_KEYS)
    | _names(("", "azure_"), "client_secret fabric_session_token proxy_url")
    | {"bearer_token"},
    "gs": _names(("", "google_"), "service_account_key bearer_token proxy_url"),
}
# The store that each scheme of an address means.
STORES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "az": "azure",
    "adl": "azure",
    "azure": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
_HARMLESS_ANYWHERE = set[str]().union(*_HARMLESS.values())


def is_option(name: str) -> bool:
    """Is it the name of an option of some store, or of the environment variable for it?"""
    return name.lower() in _HARMLESS_ANYWHERE or any(name.lower() in of for of in _SECRET.values())


def _as_text(options: Any) -> Any:
    """YAML's `true` and `10` as the texts that object_store expects: "true", "10"."""
    if not isinstance(options, dict):
        return options
    texts = {}
    for name, value in options.items():
        # bool comes first: in Python, True is an int.
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, (int, float)):
            value = str(value)
        texts[name] = value
    return texts


def _harmless(options: dict[str, str] | None) -> dict[str, str] | None:
    """The options that may be saved. An address with a password in it may not."""
    harmless = {}
    for name, value in (options or {}).items():
        # "@": an address may hold user:password@host.
        is_known = name.lower() in _HARMLESS_ANYWHERE
        if is_known and "@" not in value and not holds_secret(value):
            harmless[name] = value
    return harmless or None


StorageOptions = Annotated[
    dict[str, str] | None,
    BeforeValidator(_as_text),
    PlainSerializer(_harmless, return_type=dict[str, str] | None, when_used="json"),
]


def check(uri: str, options: dict[str, str] | None) -> None:
    """Raise ConfigError for an option that the store of `uri` would ignore.

    Options of a store that raypipe does not know are not checked. Values that may be secrets are
    kept out of all later messages.
    """
    store = STORES.get(uri.partition("://")[0])
    for name, value in (options or {}).items():
        # From here on errors.py hides these values in every message.
        if name.lower() not in _HARMLESS_ANYWHERE:
            keep_secret(value)
        keep_secrets_of(value)
        if store is None:
            continue

        known = _HARMLESS[store] | _SECRET[store]
        if name.lower() not in known:
            # Suggest a name in the user's own case.
            candidates = [n.upper() if name.isupper() else n for n in known]
            suggestion = nearest(name, candidates)
            if not suggestion.startswith("Did"):
                suggestion = "Options are those of object_store, like AWS_ENDPOINT_URL"
            raise ConfigError(
                f"Unknown storage option {name}",
                rule=f"{uri} would be opened without it",
                fix=suggestion,
            )


def refuse_in_file(cfg: BaseModel, name: str = "") -> None:
    """Raise ConfigError for storage options that are credentials, at any depth of `cfg`.

    With --submit the configuration file is sent to the cluster, which keeps it.
    """
    for attribute, value in cfg:
        full_name = f"{name}.{attribute}".removeprefix(".")
        if isinstance(value, BaseModel):
            refuse_in_file(value, full_name)
        if not attribute.endswith("storage_options"):
            continue

        # An option that is not saved is a credential, or may be one.
        options = value or {}
        harmless = _harmless(options) or {}
        if options != harmless:
            secret_names = sorted(options.keys() - harmless.keys())
            raise ConfigError(
                "The configuration holds a credential, and the cluster would keep it in a file",
                got=f"{full_name}: {', '.join(secret_names)}",
                rule="--submit sends the working folder, and with it the configuration",
                fix=stores.WHERE_KEYS.partition(", or")[0],
            )


def refuse_credentials(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override of a storage option that is not known to be harmless.

    The command line of a job is shown on the cluster's dashboard.
    """
    for override in overrides:
        key = override.partition("=")[0]
        # table.storage_options.AWS_REGION: section table, option AWS_REGION.
        section, marker, option = key.partition("storage_options")
        if not marker:
            continue
        if option.removeprefix(".").lower() not in _HARMLESS_ANYWHERE:
            raise ConfigError(
                "The cluster's dashboard would show a credential",
                got=section + marker + option,
                fix=stores.WHERE_KEYS,
            )


def refusal(error: Exception, uri: str, what: str, fix: str = "") -> DataError:
    """The DataError for an error of deltalake.

    When the object store failed, the message has the store's cause and fix. Otherwise it has `what`
    and `fix`. Unreachable: the store failed, or the system (a forbidden file); FullDisk.
    """
    message = stores.message_of(error)
    if stores.is_full(error):
        return FullDisk(
            f"{what}: {message}", got=uri, rule="The disk is full", fix=stores.MAKE_ROOM
        )
    known = stores.cause(error, uri)
    if known is None:
        kind = Unreachable if stores.of_system(error) else DataError
        return kind(f"{what}: {message}", got=uri, fix=fix)
    return Unreachable(
        f"{what}: {known.cause} ({stores.brief(message)})",
        got=uri,
        rule=known.rule,
        fix=known.fix,
    )

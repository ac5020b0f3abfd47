"""The settings of a sink of type azure_monitor, in `watch.sinks`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from raypipe.config import RunConfig, Section
from raypipe.errors import keep_secret
from raypipe.monitor import streams


class StreamNames(Section):
    """The rule's names of the streams."""

    training: str = f"Custom-{streams.TRAINING}"
    """Epochs of trainings and reports of trials."""
    drift: str = f"Custom-{streams.DRIFT}"
    """Checks, decisions, retrains, promotions, heartbeats."""
    serving: str = f"Custom-{streams.SERVING}"
    """Requests of `raypipe serve`, an interval each."""
    dropped: str = f"Custom-{streams.DROPPED}"
    """How many records were dropped, and why."""

    @field_validator("*")
    @classmethod
    def _custom(cls, name: str) -> str:
        if not re.fullmatch(r"Custom-[A-Za-z]\w*", name, re.ASCII):
            raise ValueError("a stream is named Custom-NAME: letters, digits and _")
        return name

    def of(self, stream: str) -> str:
        """The rule's name of a stream; of one that this version does not know, its own."""
        named = {
            streams.TRAINING: self.training,
            streams.DRIFT: self.drift,
            streams.SERVING: self.serving,
            streams.DROPPED: self.dropped,
        }
        return named.get(stream, f"Custom-{stream}")


class AzureMonitorConfig(Section):
    """Training, drift and serving records, to tables of Log Analytics."""

    type: Literal["azure_monitor"]
    """By the Logs Ingestion API. It needs `pip install 'raypipe[azure]'`."""
    endpoint: str
    """https://NAME.REGION.ingest.monitor.azure.com: of the data collection endpoint, or of a rule
    of kind Direct."""
    rule: str
    """The immutable id of the data collection rule: dcr-…"""
    streams: StreamNames = StreamNames()
    """The rule's names of the streams: training, drift, serving, dropped."""
    token_env: str | None = None
    """The environment variable with a bearer token. null: azure-identity's DefaultAzureCredential,
    which finds a workload identity, a managed identity or a login of `az`."""
    spool: str | None = None
    """A folder where records wait until they are sent. null: in run.dir. Name one on a local disk
    where run.dir is a mount without locks or appending."""
    spool_mb: float = Field(default=64.0, ge=1, le=1_000_000)
    """Mebibytes of disk that waiting records may take. Beyond that the oldest are dropped, counted
    and reported."""
    every_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds between two deliveries."""
    within_s: float = Field(default=20.0, gt=0, le=300)
    """Seconds that the end of a verb may wait for the last delivery. What is left, the next verb
    with this run.dir or spool delivers."""

    @field_validator("endpoint")
    @classmethod
    def _https(cls, endpoint: str) -> str:
        # Host names, IPv4 and IPv6. A path would be asked for the rule, and answer 404.
        if not re.fullmatch(r"https://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?/?", endpoint):
            raise ValueError("an endpoint is https://HOST and no more: a token is sent there")
        return endpoint.rstrip("/")

    @field_validator("token_env")
    @classmethod
    def _variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            # It may be the token itself.
            keep_secret(name)
            raise ValueError("token_env is the name of an environment variable, not the token")
        return name

    @field_validator("rule")
    @classmethod
    def _immutable_id(cls, rule: str) -> str:
        if not re.fullmatch(r"dcr-[0-9A-Za-z-]+", rule):
            raise ValueError(
                "this is no immutable id: it begins with dcr-. The rule's JSON view and "
                "Terraform's immutable_id show it"
            )
        return rule

    @field_validator("spool")
    @classmethod
    def _folder(cls, spool: str | None) -> str | None:
        if spool is not None and ("://" in spool or not spool.strip()):
            raise ValueError("a spool is a folder of this machine")
        return spool

    def folder(self, run: RunConfig) -> Path:
        """Where records wait: apart for each endpoint and rule, so that none gets another's."""
        key = hashlib.sha256(f"{self.endpoint} {self.rule}".encode()).hexdigest()[:16]
        base = Path(self.spool).expanduser().absolute() if self.spool else run.path / "sinks"
        return base / f"azure-{key}"

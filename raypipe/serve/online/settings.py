"""The settings of the online server: the section `serve`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raypipe.config import LONGEST_S, Section
from raypipe.images.decode import MAX_PIXELS

Batching = Literal["auto", "on", "off"]


class ChallengerConfig(Section):
    """A second model that gets a share of the requests."""

    alias: str = "challenger"
    """Alias of the version that challenges the champion. It is followed like the champion's."""

    share: float = Field(default=0.1, ge=0, le=1)
    """Share of the requests that the challenger gets. The request's id decides."""

    shadow: bool = False
    """true: the champion answers these requests; the challenger's predictions are only counted and
    logged. false: the challenger answers them, or the champion if the challenger fails."""


class ServeConfig(Section):
    """How the champion answers requests over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that others can reach needs a token."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0: a free one, which is printed when the server is ready."""

    token_file: str | None = None
    """File with the bearer token that clients must send; only its owner may read it (mode 0600).
    null: the environment variable RAYPIPE_SERVE_TOKEN. Without both, clients need no token."""

    replicas: int = Field(default=1, ge=1)
    """Number of processes that answer. Each loads the model, listens on the port and follows the
    alias. The kernel distributes connections among them."""

    cpus: int | None = Field(default=None, ge=1)
    """CPUs and worker threads of a replica. null: the node's CPUs, shared among the replicas."""

    batching: Batching = "auto"
    """auto: measure at start which batch sizes are faster on this machine, and use only those. on:
    predict all waiting images together. off: one by one."""

    batch_size: int = Field(default=32, ge=1)
    """Most images that are predicted together."""

    batch_wait_ms: float = Field(default=0, ge=0, le=1000 * LONGEST_S)
    """With batching=on: milliseconds that a batch that is not full waits for more images. 0: it
    takes only those that wait already."""

    max_bytes: int = Field(default=10 * 2**20, ge=1)
    """Largest request body in bytes; a larger one gets 413."""

    max_pixels: int = Field(default=MAX_PIXELS, ge=1)
    """Largest image, width x height in pixels. It is read from the header, before decoding; a
    larger image gets 422."""

    rate: float | None = Field(default=None, gt=0)
    """Requests per second that one client address may send to a replica; bursts may be twice as
    many. More get 429. Behind a proxy all clients have the proxy's address. null: no limit."""

    queue: int = Field(default=256, ge=1)
    """Requests that a replica accepts at a time; more get 503 at once."""

    queue_mb: int = Field(default=256, ge=1)
    """Memory for the bodies of these requests, in MiB; if it is full, more get 503."""

    timeout_s: float = Field(default=30, gt=0, le=LONGEST_S)
    """Seconds until a request is refused: 408 while its body arrives, 503 while it waits. A server
    that stops waits as long for running requests."""

    follow_s: float = Field(default=2, gt=0, le=LONGEST_S)
    """Seconds between two readings of the alias."""

    version: int | None = Field(default=None, ge=1)
    """Serve this version of the model and ignore the alias. null: follow the alias."""

    keep: float = Field(default=1, ge=0, le=1)
    """Share of the requests that are kept in the request log with image, embedding and scores."""

    requests: str | None = None
    """Address of the request log: a folder of three Delta tables. null: `requests` in the run's
    folder."""

    new_labels: bool = False
    """true: /feedback takes labels that the champion does not know. false: it refuses them with
    422, because a typing error would become a class."""

    flush_s: float = Field(default=5, gt=0, le=LONGEST_S)
    """Seconds between two writes of the request log."""

    challenger: ChallengerConfig | None = None
    """A second version that gets a share of the requests. null: none."""

    @model_validator(mode="after")
    def _fits(self) -> ServeConfig:
        """Refuse limits that contradict each other."""
        if self.max_bytes > self.queue_mb * 2**20:
            raise ValueError("queue_mb must hold at least one body of max_bytes")
        if self.version is not None and self.challenger is not None:
            raise ValueError("a pinned version has no challenger. Leave serve.version out")
        return self

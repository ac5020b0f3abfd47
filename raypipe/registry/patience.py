"""What a user hears while MLflow's server does not answer, and how long opening a store may take.

MLflow tries a server that is not there eight times, silently: four minutes where it refuses the
connection, twenty where packets vanish. The first question to a server is therefore asked with
fewer and shorter tries (OPENING). Later ones keep MLflow's own: a training of hours should survive
a restart of the server. Whatever takes longer than SAY_AFTER_S is said, with the host's name.
Variables that the user has set count before ours.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from urllib.parse import urlsplit

from raypipe.errors import hidden

log = logging.getLogger("raypipe")
SAY_AFTER_S = 10.0
RETRIES, TIMEOUT_S = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"
# Refused: 28 s of pauses (0, 4, 8 and 16 s). Packets that vanish: 5 tries of 15 s more.
OPENING = {RETRIES: "4", TIMEOUT_S: "15"}


def host_of(address: str) -> str:
    """Host and port of a store's address; "" for one in a file, the name itself of `databricks`."""
    if address.startswith(("sqlite:", "sqlite+")):
        return ""
    try:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return hidden(address)
    return f"{parts.hostname}{port}" if parts.hostname else hidden(address)


@contextmanager
def opening() -> Iterator[None]:
    """Inside, MLflow asks a server as often and as long as OPENING says."""
    ours = {name: value for name, value in OPENING.items() if not os.environ.get(name)}
    given = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in given.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def told(*addresses: str) -> Iterator[None]:
    """One line in the log if the block, which asks the stores of these addresses, takes long."""
    hosts = list(dict.fromkeys(host for address in addresses if (host := host_of(address))))
    if not hosts:
        yield
        return
    said = (
        f"Waiting for MLflow at {' and '.join(hosts)} for {SAY_AFTER_S:g} s: it may be offline, or "
        f"busy. MLflow tries again by itself; {RETRIES} and {TIMEOUT_S} say how long"
    )
    timer = threading.Timer(SAY_AFTER_S, log.warning, [said])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Told:
    """MLflow's client: each call of it that takes long is said (`told`).

    address: of runs; it has answered already. registry: of models, where they are elsewhere. Its
    first question is asked as when a store is opened.
    """

    def __init__(self, client: Any, address: str, registry: str) -> None:
        self._client, self._runs, self._registry = client, address, registry
        self._has_answered = registry == address

    def __getattr__(self, name: str) -> Any:
        # Copies and pickles ask for names before there is a client.
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._client, name)
        if not callable(found):
            return found
        # Logged models are in the store of runs.
        of_models = "registered_model" in name or "model_version" in name
        return self._told(found, of_models)

    def _told(self, call: Callable[..., Any], of_models: bool) -> Callable[..., Any]:
        address = self._registry if of_models else self._runs

        @wraps(call)
        def asked(*given: Any, **named: Any) -> Any:
            is_first = of_models and not self._has_answered
            with opening() if is_first else nullcontext(), told(address):
                try:
                    found = call(*given, **named)
                except Exception as e:
                    # A refusal is an answer, too.
                    self._has_answered |= of_models and not no_answer(e)
                    raise
            self._has_answered |= of_models
            return found

        return asked


def no_answer(error: BaseException) -> bool:
    """Did the server not answer at all, or only with "not now"?"""
    from requests import exceptions

    lost = (exceptions.ConnectionError, exceptions.Timeout, exceptions.RetryError)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, lost):
            return True
        seen = seen.__cause__ or seen.__context__
    return False

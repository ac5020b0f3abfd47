"""Checks of Ray: the token, the cluster that a verb would join, others on this host."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from raypipe.cluster import head
from raypipe.doctor.finding import Asked, Finding, Mend, State, of_error, ok, skipped
from raypipe.doctor.process import Died, ask
from raypipe.doctor.web import Answer, get
from raypipe.errors import ClusterError

MODE = "RAY_AUTH_MODE"
METADATA = "raypipe.cluster.ray_private:metadata"
ANSWER_S = 10.0
WORDS = "local", "none", "spark"  # for addresses
DASHBOARD = "http://", "https://"  # what its address begins with
PRIVATE = "it belongs to a program, and ends with it"


def token(asked: Asked) -> Sequence[Finding]:
    """Is token authentication on here, and is the token this user's alone?"""
    mode = os.environ.get(MODE)
    if mode not in (None, "token"):
        rule = "A cluster without a token runs what anybody sends; one with a token refuses you"
        return [Finding("token", "fail", f"{MODE}={mode}", rule, f"export {MODE}=token")]
    if os.environ.get("RAY_AUTH_TOKEN"):
        return [ok("token", "in RAY_AUTH_TOKEN")]
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not file.exists():
        return [_no_token(file)]
    return [_token_in(file)]


def _no_token(file: Path) -> Finding:
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        return ok("token", "none yet; the first local cluster makes one")
    rule = "Ray reads its token there"
    way_out = "unset RAY_AUTH_TOKEN_PATH, or copy the cluster's token there"
    return Finding("token", "fail", f"There is no {file} (RAY_AUTH_TOKEN_PATH)", rule, way_out)


def _token_in(file: Path) -> Finding:
    named = shlex.quote(str(file))
    try:
        content = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        rule = "Ray must read it to join a cluster"
        seen = f"{file} cannot be read: {type(e).__name__}"
        return Finding("token", "fail", seen, rule, f"chmod 600 {named}, as its owner")
    if not content:
        rule = "An empty token is none, and Ray ends a process without one"
        way_out = f"rm {named}; ray get-auth-token --generate > /dev/null && chmod 600 {named}"
        return Finding("token", "fail", f"{file} is empty", rule, way_out)
    mode = stat.S_IMODE(file.stat().st_mode)
    if not mode & 0o077:
        return ok("token", f"{file}, mode {mode:04o}")
    rule = "Whoever reads it may run code on your cluster. Ray leaves it readable"
    mend = Mend(f"chmod 600 {named}", lambda: file.chmod(0o600))
    return Finding("token", "fail", f"{file} has mode {mode:04o}", rule, f"chmod 600 {named}", mend)


@dataclass(frozen=True)
class Told:
    """What a cluster told about itself, or why it did not."""

    address: str
    ray: str = ""
    python: str = ""
    is_private: bool = False
    error: str = ""


def clusters(asked: Asked) -> Sequence[Finding]:
    """The cluster that a verb would join, and the others on this host."""
    found = ask("raypipe.cluster.shared:here", ANSWER_S)
    setting, address = _wanted(asked, found["recorded"])
    here = found["running"]
    if address and not address.startswith((*DASHBOARD, "ray://")):
        here = [*dict.fromkeys([address, *here])]
    # Each question is a process of its own, and may wait for a cluster that hangs.
    with ThreadPoolExecutor(max_workers=4) as threads:
        told = {each.address: each for each in threads.map(_ask, here)}
    return [_joined(setting, address, told), _others(setting, address, told)]


def _wanted(asked: Asked, recorded: Sequence[str]) -> tuple[str, str]:
    """The setting that names the cluster, and its address; "" if raypipe starts one itself."""
    configured = asked.settings.cluster.address
    if configured != "auto":
        return f"cluster.address={configured}", "" if configured in WORDS else configured
    in_environment = os.environ.get("RAY_ADDRESS", "")
    if in_environment not in ("", "auto"):
        is_word = in_environment in WORDS
        return f"RAY_ADDRESS={in_environment}", "" if is_word else in_environment
    return "cluster.address=auto", "".join(recorded)


def _ask(address: str) -> Told:
    if not head.listens(address):
        return Told(address, error="nobody listens there")
    # As verbs do: a value of the user's own wins.
    mode = {MODE: os.environ.get(MODE, "token")}
    try:
        told = ask(METADATA, ANSWER_S, mode, address=address)
    except Died as e:
        return Told(address, error=str(e))
    return Told(
        address, told["ray_version"], told["python_version"], bool(told["ray_init_cluster"])
    )


def _joined(setting: str, address: str, told: dict[str, Told]) -> Finding:
    """The finding about the cluster that a verb would join."""
    if setting.endswith(("=local", "=none")):
        return skipped("cluster", f"{setting} joins none")
    if setting.endswith("=spark"):
        return skipped("cluster", f"{setting}: it starts with the verb")
    # Verbs ignore a dashboard in RAY_ADDRESS, which is for `ray job submit`.
    if address.startswith(DASHBOARD) and setting.startswith("RAY_ADDRESS"):
        return _dashboard(setting, address)
    if address:
        try:
            head.require_form(address, setting.partition("=")[0])
        except ClusterError as e:
            return of_error("cluster", e)
    # Ray's record of a cluster stays when the cluster is killed; raypipe then starts its own.
    from_record = setting == "cluster.address=auto"
    if not address or (from_record and address in told and _is_gone(told[address])):
        return ok("cluster", "none runs for this user; raypipe starts one for each verb")
    return _about(setting, told[address])


def _is_gone(cluster: Told) -> bool:
    return cluster.error == "nobody listens there"


def _dead(setting: str, rule: str = "It names the cluster that every verb joins") -> Finding:
    way_out = "Start that cluster again, or name none: unset RAY_ADDRESS, cluster.address=auto"
    return Finding("cluster", "fail", f"{setting}: nobody listens there", rule, way_out)


def _refused(setting: str) -> Finding:
    rule = f"{MODE}=token on both sides, and the same token: ~/.ray/auth_token of the head"
    way_out = (
        "Copy the head's ~/.ray/auth_token here (mode 600) or into RAY_AUTH_TOKEN; "
        "cluster.address=local starts a cluster of your own"
    )
    return Finding("cluster", "fail", f"{setting} refuses this token", rule, way_out)


def _about(setting: str, cluster: Told) -> Finding:
    import importlib.metadata
    import platform

    if _is_gone(cluster):
        return _dead(setting)
    # Without any token Ray aborts the process that asks.
    if "Authentication" in cluster.error or (cluster.error and not _secret()):
        return _refused(setting)
    if cluster.error:
        rule = "A Ray cluster answers within a second"
        way_out = "Look at its logs in /tmp/ray/session_latest/logs, or start it again"
        return Finding("cluster", "fail", f"{setting}: {cluster.error}", rule, way_out)
    # `cluster` answers: do versions fit, and may one join it?
    own = importlib.metadata.version("ray"), platform.python_version()
    its = cluster.ray, cluster.python
    if own != its:
        seen = f"{setting} has Ray {its[0]} and Python {its[1]}, here are {own[0]} and {own[1]}"
        rule = "Ray joins only a cluster of the same versions of Ray and Python"
        way_out = f"Install ray=={its[0]} with Python {its[1]}, or --submit to its dashboard"
        return Finding("cluster", "fail", seen, rule, way_out)
    if cluster.is_private:
        rule = f"Do not join it: {PRIVATE}, sometimes without a message"
        way_out = "unset RAY_ADDRESS, or name a cluster that `ray start` made"
        return Finding("cluster", "fail", f"{setting} is private", rule, way_out)
    if _takes_anybody(cluster.address):
        rule = "Whoever reaches it may run code on it"
        way_out = f"ray stop; export {MODE}=token; ray start --head"
        return Finding("cluster", "warn", f"{setting} asks for no token", rule, way_out)
    if MODE not in os.environ:
        seen = f"{cluster.address} asks for a token, and {MODE} is not set here"
        rule = "raypipe sets it for itself; `ray job submit` and `ray status` are refused without"
        return Finding("cluster", "warn", seen, rule, f"export {MODE}=token")
    return ok("cluster", f"{cluster.address} with Ray {cluster.ray}")


def _takes_anybody(address: str) -> bool:
    """Does the cluster answer a question without a token?"""
    try:
        ask(METADATA, ANSWER_S, {MODE: "disabled"}, address=address)
    except Died:
        return False
    return True


def _dashboard(setting: str, address: str) -> Finding:
    secret = _secret()
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    answer: Answer = get(f"{address.rstrip('/')}/api/version", headers)
    if answer.status in (401, 403):
        return _refused(setting)
    if answer.status == 200:
        return ok("cluster", f"{setting} answers; verbs that are submitted run there")
    rule = "`ray job submit` asks it; verbs here start a cluster of their own"
    return _dead(f"{setting} ({answer.error or answer.status})", rule)


def _secret() -> str:
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _others(setting: str, address: str, told: dict[str, Told]) -> Finding:
    """The finding about all clusters with a raylet on this host."""
    name = "other clusters"
    # Ray's record of a cluster stays when the cluster is killed.
    if address in told and _is_gone(told[address]):
        address = ""
    # A cluster that refuses the token counts as somebody else's.
    others = [each for each in told.values() if each.address != address and not _is_gone(each)]
    private = [each.address for each in others if each.is_private]
    open_ = [each.address for each in others if not each.is_private and not each.error]
    left_alone = f"{len(private)} of other programs, which are left alone" if private else "none"
    if not open_ or setting != "cluster.address=auto":
        return ok(name, left_alone)
    seen = f"{' and '.join([*filter(None, [address]), *open_])} run here; private: {left_alone}"
    # raypipe's own local cluster stands beside another one; two of `ray start` get mixed up.
    state: State = "fail" if address else "warn"
    rule = "With two on one host, a job may land on the wrong one, and Ray Train's clean-up fails"
    way_out = f"export RAY_ADDRESS={address or open_[0]}, or `ray stop` the one that is not needed"
    return Finding(name, state, seen, rule, way_out)

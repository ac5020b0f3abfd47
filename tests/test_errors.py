"""Every message has its four parts, and the error is the same one after crossing Ray."""

from __future__ import annotations

import pickle
import time

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError

from raypipe.cluster.connect import prepare_environment
from raypipe.errors import ClusterError, ConfigError, DataError, RaypipeError, hidden, nearest
from raypipe.failures import find_own
from raypipe.images.decode import BadImage

KINDS = [RaypipeError, ConfigError, DataError, ClusterError]
PARTS = {"got": ["a", 1], "rule": "One label a file", "fix": "Mend the CSV"}


def test_a_message_holds_what_it_got_which_rule_it_breaks_and_the_way_out() -> None:
    error = DataError("The CSV gives two labels", **PARTS)
    assert str(error) == "The CSV gives two labels (got ['a', 1]). One label a file. Mend the CSV."
    assert str(DataError("Too late")) == "Too late."
    assert str(DataError("Really?", got=0, fix="Write 1.")) == "Really? (got 0). Write 1."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_an_error_pickles_from_its_four_parts(kind: type[RaypipeError], module: object) -> None:
    error = kind("Wrong", **PARTS)
    again = module.loads(module.dumps(error))
    assert type(again) is kind
    assert (str(again), again.what, again.got, again.rule, again.fix) == (
        str(error),
        "Wrong",
        *PARTS.values(),
    )


def test_a_bad_image_pickles_with_its_reason() -> None:
    error = BadImage("too_large", "10x10: is over 50 pixels")
    again = cloudpickle.loads(cloudpickle.dumps(error))
    assert (again.reason, str(again)) == ("too_large", str(error))
    assert "10x10: is over 50 pixels" in str(again)


def test_users_mistakes_exit_with_2_and_failed_work_with_1() -> None:
    assert [kind.exit_code for kind in KINDS] == [1, 2, 2, 2]


def test_the_nearest_name_is_offered_or_else_all_that_exist() -> None:
    assert nearest("lable", ["label", "split"]) == "Did you mean 'label'?"
    assert nearest("zzz", ["split", "label"]) == "Known: label, split"


def test_our_error_is_found_inside_what_ray_and_python_wrapped_around_it() -> None:
    own = DataError("Wrong", **PARTS)
    assert find_own(RayTaskError("f", "a traceback", own)) is own
    assert find_own(RayTaskError("f", "a traceback", own).as_instanceof_cause()) is own
    try:
        try:
            raise own
        except DataError as e:
            raise RuntimeError("on the way up") from e
    except RuntimeError as wrapped:
        assert find_own(wrapped) is own
    assert find_own(RayTaskError("f", "a traceback", KeyError("ours"))) is None
    loop = ValueError("a circle")
    loop.__cause__ = loop
    assert find_own(loop) is None


@pytest.mark.usefixtures("ray_session")
def test_an_error_raised_on_a_worker_arrives_whole() -> None:
    prepare_environment()
    import ray

    @ray.remote
    def fail() -> None:
        raise DataError("Wrong", got=3, fix="Mend it")

    with pytest.raises(DataError, match=r"Wrong") as caught:
        ray.get(fail.remote())
    own = find_own(caught.value)
    assert type(own) is DataError
    assert (str(own), own.got, own.exit_code) == ("Wrong (got 3). Mend it.", 3, 2)


def test_a_secret_that_one_process_knows_does_not_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has a password in its environment; the driver, which shows the error, has not."""
    monkeypatch.setenv("OF_THE_NODE_PASSWORD", "canary-of-the-node")
    error = DataError("no login: canary-of-the-node", got=["canary-of-the-node"], fix="Not canary")
    plain = DataError("wrong", got={"a": 1}, rule="A rule")
    crossed = [pickle.dumps(each) for each in (error, plain)]
    monkeypatch.delenv("OF_THE_NODE_PASSWORD")
    assert b"canary-of-the-node" not in crossed[0]
    there, other = (pickle.loads(each) for each in crossed)
    assert str(there) == "no login: *** (got ['***']). Not canary."
    assert (type(there), other.got, str(other)) == (DataError, {"a": 1}, str(plain))


def test_a_long_text_without_blanks_is_looked_through_at_once() -> None:
    """It took time by the square of its length: 23 s for this one."""
    began = time.process_time()
    assert hidden("y" * 200_000) == "y" * 200_000
    assert time.process_time() - began < 2
    address = "y" * 1000 + "https://someone:canary-12345@host/x"
    assert "canary-12345" not in hidden(address)


@pytest.mark.parametrize("text", ["a@b " + "http://host," * 20_000, "@" + "http://host," * 20_000])
def test_many_addresses_without_a_blank_are_looked_through_at_once(text: str) -> None:
    """Each host was the beginning of a password that may end with the text: minutes of 240 kB."""
    began = time.perf_counter()
    assert hidden(text) == text
    assert time.perf_counter() - began < 2
    secret = "https://u:pass,word@host," + text
    assert hidden(secret).startswith("https://u:***@") and "pass,word" not in hidden(secret)

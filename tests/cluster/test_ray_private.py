"""Ray's private names still mean what ray_private.py takes them for.

One test a name: the name of the failing test says what an upgrade has moved.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.tune.schedulers import PopulationBasedTraining

from raypipe.cluster import ray_private

from .joined import Joined


def test_ray_keeps_the_address_of_ray_start_in_a_file() -> None:
    assert Path(ray_private.address_file()).name == "ray_current_cluster"


def test_a_cluster_of_ray_init_says_so_in_its_metadata(ray_session: str) -> None:
    assert ray_private.is_of_program(ray_session)


TOKEN = """
import sys
from raypipe.cluster import ray_private
print(ray_private.token_fault() or ray_private.refuses_token(sys.argv[1], 5.0))
"""


def test_a_head_says_whether_it_takes_a_token(ray_session: str, tmp_path: Path) -> None:
    # Ray reads mode and token once a process.
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    nowhere = str(tmp_path / "none")
    cases = [
        ({"RAY_AUTH_MODE": "token"}, "False"),
        ({"RAY_AUTH_MODE": "disabled"}, "True"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, "True"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": nowhere}, nowhere),
    ]
    for more, said in cases:
        done = subprocess.run(
            [sys.executable, "-c", TOKEN, ray_session],
            env=bare | more,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip().endswith(said), done


def test_ray_train_may_be_kept_from_ctrl_c() -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    plain, before = DataParallelTrainer._register_sigint_handler, signal.getsignal(signal.SIGINT)
    with ray_private.plain_interrupts():
        DataParallelTrainer._register_sigint_handler(None, None)
        assert signal.getsignal(signal.SIGINT) is before
    assert DataParallelTrainer._register_sigint_handler is plain
    assert "self._register_sigint_handler(" in inspect.getsource(
        DataParallelTrainer._initialize_and_run_controller
    )


@pytest.mark.usefixtures("ray_session")
def test_head_and_raylet_are_known_to_the_process_that_started_them() -> None:
    processes = ray_private.own_processes(["gcs_server", "raylet"])
    assert processes is not None
    for name in ("gcs_server", "raylet"):
        assert len(processes[name]) == 1 and processes[name][0].poll() is None


def test_a_cluster_of_ours_has_no_module_that_asks_who_the_host_is(own_cluster: Joined) -> None:
    modules = [word for word in own_cluster.dashboard if word.startswith("--modules")]
    assert modules == ["--modules-to-load=PlatformEventsHead"]
    assert "Loaded 0 dashboard head modules" in own_cluster.log


@pytest.mark.usefixtures("ray_session")
def test_the_raylet_of_a_node_is_found_by_the_flag_that_it_alone_has() -> None:
    processes = ray_private.own_processes(["raylet"])
    assert processes is not None
    raylet = ray_private.raylet_of(ray.get_runtime_context().get_node_id())
    assert raylet is not None and raylet.pid == processes["raylet"][0].pid
    assert ray_private.raylet_of("0" * 56) is None


@pytest.mark.usefixtures("ray_session")
def test_free_resources_are_less_than_what_the_nodes_have() -> None:
    @ray.remote(num_cpus=1)
    class Holder:
        def ready(self) -> bool:
            return True

    whole = ray_private.free_resources()
    assert set(whole) == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    holder = Holder.remote()
    assert ray.get(holder.ready.remote())
    before, after = (sum(node.get("CPU", 0) for node in n.values()) for n in (whole, free_cpus(1)))
    assert before - after == pytest.approx(1)
    ray.kill(holder)


def free_cpus(used: int) -> dict[str, dict[str, float]]:
    """The free resources, once Ray has counted the CPUs in use: it does so twice a second."""
    total = ray.cluster_resources()["CPU"]
    for _ in range(50):
        free = ray_private.free_resources()
        if sum(node.get("CPU", 0) for node in free.values()) <= total - used:
            return free
        time.sleep(0.1)
    return free


@pytest.mark.usefixtures("ray_session")
def test_replicas_that_wait_for_room_are_known_by_their_name_and_state() -> None:
    @ray.remote(num_cpus=1)
    class Waiting:
        pass

    total = int(ray.cluster_resources()["CPU"])
    # More than fit: the last ones wait.
    names = [f"SERVE_REPLICA::{app}#replica#x{n}" for app in "ab" for n in range(total + 1)]
    options = {"namespace": "serve", "lifetime": "detached"}
    made = [Waiting.options(name=name, **options).remote() for name in names]  # type: ignore[attr-defined]

    def there() -> set[str]:
        return {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}

    try:
        running = ray._private.state.actors(actor_state_name="ALIVE")
        for _ in range(200):
            running = ray._private.state.actors(actor_state_name="ALIVE")
            if sum(actor["Name"] in names for actor in running.values()) == total:
                break
            time.sleep(0.1)
        alive = {actor["Name"] for actor in running.values()} & set(names)
        ray_private.end_waiting_replicas("a")
        left = alive | {name for name in names if "::b#" in name}
        for _ in range(100):
            if there() & set(names) == left:
                break
            time.sleep(0.1)
        assert len(alive) == total and there() & set(names) == left
    finally:
        for each in made:
            ray.kill(each)


def test_a_group_that_finds_no_room_has_errors_of_its_own() -> None:
    names = [error.__name__ for error in ray_private.late_starts()]
    assert names == ["WorkerGroupStartupFailedError", "WorkerGroupStartupTimeoutError"]
    assert all(issubclass(error, Exception) for error in ray_private.late_starts())


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("_save_trial_state", ["self", "state", "time", "result", "trial"]),
        ("_quantiles", ["self"]),
        ("_get_new_config", ["self", "trial", "trial_to_clone"]),
        ("_exploit", ["self", "tune_controller", "trial", "trial_to_clone"]),
    ],
)
def test_pbt_has_the_methods_that_the_population_overrides(
    method: str, arguments: list[str]
) -> None:
    code = getattr(PopulationBasedTraining, method).__code__
    assert list(code.co_varnames[: code.co_argcount]) == arguments


def test_ray_on_spark_has_the_names_that_are_replaced_while_it_starts() -> None:
    pytest.importorskip("pyspark", reason="raypipe[spark]")
    import inspect

    from ray.util.spark import cluster_init, databricks_hook

    head = inspect.signature(cluster_init._start_ray_head_node)
    assert list(head.parameters) == ["ray_head_node_cmd", "synchronous", "extra_env"]
    assert cluster_init._RAY_HEAD_STARTUP_TIMEOUT > 0
    source = inspect.getsource(cluster_init)
    assert 'f"--dashboard-host={' in source and "time.sleep(_RAY_HEAD_STARTUP_TIMEOUT)" in source
    before = cluster_init.get_spark_session, ray.init
    with ray_private.spark_start("session", print, "/bin"):
        assert cluster_init.get_spark_session() == "session"
        assert databricks_hook.get_databricks_display_html_function()("warning") is None
    assert (cluster_init.get_spark_session, ray.init) == before


def test_what_ray_says_of_lost_workers_leaves_stdout_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ray._private import worker

    ray_private.errors_to_stderr()
    ray_private.errors_to_stderr()  # each call of connect asks for it
    lost = {"lines": ["a worker died"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(lost, ignore_prefix=False)
    out, err = capsys.readouterr()
    assert out == "" and "a worker died" in err

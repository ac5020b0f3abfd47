"""Worker processes of the tests' Ray cluster are forks of one that has imported everything.

A worker of Ray imports Ray, PyTorch and raypipe when it starts, 3 s of CPU. The tests start some
hundred workers, each for a second of work. Here the first worker's
process also starts a server, which imports these modules once. Later ones ask it for a fork.

A worker with a runtime environment of its own starts as always: what it imports may be another
copy. So does each one if there is no server, or if the server has more than one thread: a fork
would have only one of them.

Ray runs this file in the place of its own default_worker.py (see `installed`).
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MODULES = (
    "torch",
    "ray.tune",
    "raypipe.search.trials.trial",
    # What these import later: at an optimizer's first step, an image, a result of Ray's.
    "torch._dynamo",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "pyarrow.json",
    "pydantic.v1",
    "starlette.datastructures",
)
SERVER = "RAYPIPE_TESTS_FORKS"  # the path of the server's socket
MOST_BYTES = 2**20  # of a worker's arguments and environment


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """A cluster that is started within this context has such workers; `folder`: of the socket."""
    from ray._private.parameter import RayParams

    own = RayParams.update_if_absent

    def with_ours(self: RayParams, **given: object) -> None:
        own(self, **given | ({"worker_path": __file__} if "worker_path" in given else {}))

    os.environ[SERVER] = str(folder / "forks")
    RayParams.update_if_absent = with_ours
    try:
        yield
    finally:
        RayParams.update_if_absent = own
        del os.environ[SERVER]


def start() -> None:
    """What Ray runs: the worker itself, or who asks for a fork that is it."""
    if "--runtime-env-hash=0" in sys.argv and not any("_WORKER" in one for one in sys.argv):
        if asked():
            return
        with suppress(FileExistsError):
            os.close(os.open(f"{os.environ[SERVER]}.begun", os.O_CREAT | os.O_EXCL))
            if (child := os.fork()) == 0:
                os.setsid()
                # Not a child of this worker, which kills its own when it ends.
                if os.fork():
                    os._exit(0)
                with Path(f"{os.environ[SERVER]}.log").open("w") as log:
                    os.dup2(log.fileno(), 2)
                serve()
            os.waitpid(child, 0)
    work()


def work() -> None:
    import ray

    file = Path(ray.__file__).parent / "_private" / "workers" / "default_worker.py"
    sys.argv[0], sys.path[0] = str(file), str(file.parent)
    runpy.run_path(str(file), run_name="__main__")


def asked() -> bool:
    """Has the server made a worker with the arguments, environment and output of this process?"""
    told = json.dumps([sys.argv, dict(os.environ), str(Path.cwd())]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
        try:
            with short(Path(os.environ[SERVER])) as name:
                to.connect(name)
            to.sendmsg(
                [told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
            )
            return to.recv(1) == b"y"
        except OSError:
            return False


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket that listens at this path, which is there only when it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        new = path.with_name(f"{path.name}.new")
        with short(new) as name:
            server.bind(name)
        server.listen(16)
        new.rename(path)
        yield server


@contextmanager
def short(path: Path) -> Iterator[str]:
    """A name of this path for a socket, which takes no more than 107 characters: TMPDIR alone may
    have that many.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def serve() -> None:
    """Import, then fork whenever a worker asks, while the raylet lives; returns in each fork, once
    its work is done.
    """
    load(MODULES)
    # Nobody waits for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    raylet = Path("/proc") / os.environ["RAY_RAYLET_PID"]
    with listening(Path(os.environ[SERVER])) as server:
        server.settimeout(1)
        while raylet.exists():
            with suppress(TimeoutError):
                if is_fork(server.accept()[0]):
                    break
        else:
            os._exit(0)
    work()
    raise SystemExit


def load(modules: Sequence[str]) -> None:
    """Import what is installed, once for all forks: the garbage collector leaves it alone.

    Not cluster/worker.py's `load`: each worker imports that module itself, which sets its address.
    """
    gc.disable()
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def is_fork(asking: socket.socket) -> bool:
    """Fork for one who asks; true in the fork."""
    with asking:
        told, files, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
        if not has_one_thread():
            return False
        if os.fork():
            for file in files:
                os.close(file)
            return False
        asking.send(b"y")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    sys.argv, environment, folder = json.loads(told)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    import numpy as np

    np.random.seed()  # of each process its own, as Python's
    return True


def has_one_thread() -> bool:
    """Those that only give memory back are not counted: jemalloc begins them again in a fork."""
    names = [(one / "comm").read_text().strip() for one in Path("/proc/self/task").iterdir()]
    return len([name for name in names if name != "jemalloc_bg_thd"]) == 1


if __name__ == "__main__":
    start()

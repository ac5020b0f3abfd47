"""What a fresh job cluster has: Python, CPU cores and GPUs of the driver. Argument: `cpu` or `gpu`.

Fails if a GPU cluster shows no GPU.
"""

import os
import platform
import subprocess
import sys


def main(kind: str) -> None:
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores")
    if kind == "gpu":
        subprocess.run(["nvidia-smi", "--list-gpus"], check=True)


main(sys.argv[1])

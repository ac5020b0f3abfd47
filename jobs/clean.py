"""raypipe clean as a Ray job:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/clean.py
jobs/configs/solar.yaml
"""

import sys

from raypipe.main import entry

if __name__ == "__main__":
    entry(["clean", *sys.argv[1:]])

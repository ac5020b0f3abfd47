"""raypipe serve as a Ray job:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/serve.py
jobs/configs/solar.yaml
"""

import sys

from raypipe.main import entry

if __name__ == "__main__":
    entry(["serve", *sys.argv[1:]])

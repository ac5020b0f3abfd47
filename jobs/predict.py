"""raypipe predict as a Ray job:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/predict.py
jobs/configs/solar.yaml
"""

import sys

from raypipe.main import entry

if __name__ == "__main__":
    entry(["predict", *sys.argv[1:]])

"""raypipe predict as a Ray job:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/predict.py jobs/configs/solar.yaml
"""

import sys

from raypipe.cli import main

if __name__ == "__main__" and (code := main(["predict", *sys.argv[1:]])):
    sys.exit(code)  # only a failure: some job runners take any SystemExit for one

"""raypipe clean as a Ray job:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/clean.py jobs/configs/solar.yaml
"""

import sys

from raypipe.cli import main

if __name__ == "__main__" and (code := main(["clean", *sys.argv[1:]])):
    sys.exit(code)  # only a failure: some job runners take any SystemExit for one

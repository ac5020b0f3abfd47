"""raypipe table prepare as a Ray job; installed as raypipe-prepare:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/prepare.py
SRC DST
"""

from raypipe.job_commands import prepare

if __name__ == "__main__":
    prepare()

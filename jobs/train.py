"""raypipe train as a Ray job; installed as raypipe-train:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/train.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import train

if __name__ == "__main__":
    train()

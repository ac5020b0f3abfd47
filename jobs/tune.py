"""raypipe tune as a Ray job; installed as raypipe-tune:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/tune.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import tune

if __name__ == "__main__":
    tune()

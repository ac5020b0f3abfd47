"""raypipe retrain as a Ray job; installed as raypipe-retrain:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/retrain.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import retrain

if __name__ == "__main__":
    retrain()

"""raypipe clean as a Ray job; installed as raypipe-clean:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/clean.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import clean

if __name__ == "__main__":
    clean()

"""raypipe promote as a Ray job; installed as raypipe-promote:

    ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- \
        python jobs/promote.py jobs/configs/solar.yaml --version 3 --why "looked at"
"""

from raypipe.job_commands import promote

if __name__ == "__main__":
    promote()

"""raypipe rollback as a Ray job; installed as raypipe-rollback:

    ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- \
        python jobs/rollback.py jobs/configs/solar.yaml --why "too many false alarms"
"""

from raypipe.job_commands import rollback

if __name__ == "__main__":
    rollback()

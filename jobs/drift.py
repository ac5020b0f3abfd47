"""raypipe drift as a Ray job or a scheduled check; installed as raypipe-drift:

    ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- \
        python jobs/drift.py jobs/configs/solar.yaml watch.batch.uri=/tables/night --exit-code
"""

from raypipe.job_commands import drift

if __name__ == "__main__":
    drift()

"""raypipe ingest as a Ray job; installed as raypipe-ingest:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/ingest.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import ingest

if __name__ == "__main__":
    ingest()

"""raypipe evaluate as a Ray job; installed as raypipe-evaluate:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/evaluate.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import evaluate

if __name__ == "__main__":
    evaluate()

"""raypipe predict as a Ray job; installed as raypipe-predict:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/predict.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import predict

if __name__ == "__main__":
    predict()

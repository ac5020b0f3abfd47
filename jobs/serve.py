"""raypipe serve as a Ray job; installed as raypipe-serve:

ray job submit --working-dir . --runtime-env infra/ray/runtime_env.yaml -- python jobs/serve.py
jobs/configs/solar.yaml
"""

from raypipe.job_commands import serve

if __name__ == "__main__":
    serve()

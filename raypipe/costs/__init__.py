"""What a verb will take, before it runs: seconds, CPU seconds, device seconds, memory and money.

1. `rates` measures how fast this machine trains and predicts a few images of the job's own table.
2. `estimate` multiplies these rates by what the job will do. It is arithmetic alone.
3. `nodes` has prices and published rates of cloud nodes, to compare them.
"""

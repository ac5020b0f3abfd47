"""--dry-run: what a verb would do, and what it would take. It writes nothing and starts no cluster.

Data, model and workers are looked up as the verb itself does. Some of the table's own images are
measured on this machine (costs/rates.py), and the rest is arithmetic (costs/estimate.py).
"""

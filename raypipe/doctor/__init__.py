"""Looks for what is wrong with this machine, and with the places that a configuration names.

Every trap here has cost somebody an hour: another token, a store of an older MLflow, a lock that a
killed compiler left behind. A check is a small function that looks and changes nothing. It gives a
`Finding`: what was seen, which rule it breaks, the way out.

The checks run at the same time, each with a time limit. Whatever needs a heavy library or a network
runs in a process of its own (`process.py`), so that a crash or a hanging call is a finding and not
the end of the doctor. Cost on two cores: 12 s of CPU, most of it the imports of the sidecars, torch
and MLflow.
"""

"""One file per claim; each prints one JSON line of ratios measured in one run. Records are in
results/.
"""

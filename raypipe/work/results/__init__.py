"""What verbs return: the facts that people see, the summary that --json prints, and a repr.

data.py: of verbs that write rows. models.py: of those that make models. watching.py: of drift
checks and retrains.
"""

"""What the sidecars are made of, an archive of it for clusters without internet, and how one is
built on a node.
"""

"""What each verb does, from a validated Job to a result; cli/ and the Python door show it."""

"""`python -m raypipe`."""

from raypipe.main import entry

if __name__ == "__main__":
    entry()

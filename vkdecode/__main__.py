"""Runs the command line as `python -m vkdecode`."""

from vkdecode.cli import main

if __name__ == "__main__":
    main()

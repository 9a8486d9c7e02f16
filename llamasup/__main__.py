"""``python -m llamasup``: the same as the ``llamasup`` command."""

from llamasup.cli import main

if __name__ == "__main__":
    main()

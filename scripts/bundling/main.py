"""Run llamasup: the main module of the bundle."""

from llamasup.frozen import main

main()

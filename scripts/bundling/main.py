"""What the program of the bundle runs."""

from llamasup.frozen import main

main()

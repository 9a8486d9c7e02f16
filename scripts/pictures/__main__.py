"""Make the pictures of the docs from real runs: ``python -m scripts.pictures NAME``."""

from scripts.menu import run

run(
    "scripts.pictures",
    {
        "console": "the console in a browser, for docs/console.md",
        "terminal": "run, chat and launch in a terminal, for README.md and docs",
    },
)

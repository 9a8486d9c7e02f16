"""Make the demo model: ``python -m scripts.demo NAME``."""

from scripts.menu import run

run("scripts.demo", {"stories": "print stories that it learns", "train": "train it and its draft"})

"""Virtual models: names that change requests, or stand for one of several models (docs/virtual-models.md)."""

"""The API for files and batches that OpenAI's client uses (docs/batch.md)."""

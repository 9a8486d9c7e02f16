"""Writes comments to streams that wait, and counts the tokens of answers. Changes no answer."""

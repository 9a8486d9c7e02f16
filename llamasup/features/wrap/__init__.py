"""Runs the user's own llama-server command line, with only its address changed (``llamasup wrap``).

Begin with ``planner``; nothing is planned: the flags are the user's.
"""

"""A chat in the terminal with a model (``llamasup chat``). It writes to disk only what /save names.

``command.py`` chooses the server and the model. ``conversation.py`` and ``answer.py`` are pure: the messages,
the commands that begin with a slash, and the pieces of a streamed answer. ``stream.py`` requests answers,
and ``terminal.py`` reads lines and shows answers.
"""

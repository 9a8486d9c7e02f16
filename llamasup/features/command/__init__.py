"""Serves models with a command of the config: programs other than llama-server, such as whisper.cpp.

Begin with ``settings``. The core treats their processes like llama-servers (``settings.model.Engine``), and
asks them for nothing that only llama-server has.
"""

"""Continues a streamed answer on the next generation, after its llama-server has ended in mid-stream.

``answer`` reads what the client has received. ``apis`` knows the forms of a stream: it writes the request
that continues the text, and turns the events of the new stream into events of the first stream. All of it is
pure.
"""

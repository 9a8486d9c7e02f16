"""The access log, the metrics, and the last hour of requests. It changes no request.

Begin at ``counters.py``, which has the record of a finished request.
"""

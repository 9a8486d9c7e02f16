"""``llamasup tune``: measures changes of a plan on a real server, and keeps one that is proven better.

Begin with ``tune``; ``search`` decides what is measured next, and ``session`` measures it.
"""

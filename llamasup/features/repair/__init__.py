"""Makes requests usable that llama-server would refuse, and decides which answers it requests again, for
models whose config enables it.
"""

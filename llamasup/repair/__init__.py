"""Makes requests that llama-server would refuse usable, for models whose config asks for it."""
